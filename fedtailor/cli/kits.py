"""`fedtailor deploy plan`, `approve` and `doctor`, `fedtailor site request` and `install`: keys and kits."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.display import out as screen
from fedtailor.cli.display import visible

if TYPE_CHECKING:
    from fedtailor.sites.plan import Plan

Kits = Annotated[Path, typer.Argument(metavar="KITS", help="the directory of deploy plan")]
Site = Annotated[Path, typer.Argument(metavar="SITE.TOML", help="the site's file")]


def plan(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="the plan, federation.toml")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="a new directory for the kits")] = Path("kits"),
    central: Annotated[
        bool, typer.Option("--central", help="make all private keys here, those of the sites too: for trials")
    ] = False,
) -> None:
    """Check a plan, and make a directory for each role: what to run, and its keys.

    Private keys of the sites are made at the sites: send each its directory. `--central` makes them here, for trials.

    [bold]Examples[/]
      fedtailor deploy plan federation.toml --out kits
      fedtailor deploy plan federation.toml --out trial --central
    """
    from fedtailor.sites.kits import make_kits

    made = make_kits(file, out, central)
    _say(f"The kits of {made.name} are in {out}: {_counted(len(made.sites), 'site')}, the server and its admin.")
    _say(_code(made))
    if central:
        _say(
            f"All private keys were made here, those of the root and of every site too. They are locked away in {out} "
            "(mode 0600), but who has this directory can pass for any site: use it for trials only."
        )
        _say(f"Each site's directory in {out} is ready: see its README.md.")
    else:
        _say(
            f"The root's private key is in {out / 'ca'}: keep it to yourself. The sites make their own: send each its "
            "directory (nothing in it is secret), and sign the request that comes back:"
        )
        _say(f"  fedtailor deploy approve {out} {made.sites[0]}.request.zip")


def approve(
    kits: Kits,
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="what a site sent")],
    fingerprint: Annotated[
        str | None, typer.Option(metavar="SHA256:…", help="the request's, as the site told it by telephone")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="the site lost its key, or renews its certificate")] = False,
) -> None:
    """Sign the request of a site, so that it may take part.

    The answer is to be sent back. A site that is not in the plan is refused.
    """
    from fedtailor.sites.kits import approve as sign
    from fedtailor.sites.kits.exchange import request_fingerprint

    signed = sign(kits, request, fingerprint, again)
    if fingerprint is None:
        _say(f"Let {signed.site} read the fingerprint of its request to you by telephone before you send anything:")
        _say(f"  {request_fingerprint(request)}")
    _say(f"Signed. Send {signed.file} to {signed.site}, and tell this fingerprint by telephone, not by mail:")
    _say(f"  {signed.fingerprint}")


def request(site: Site) -> None:
    """Make the site's keys, which stay here, and a request to be signed."""
    from fedtailor.sites.kits import request_kit

    made = request_kit(site)
    _say(f"The key of {made.site} is made, and stays here.")
    _say(f"Send {made.file} to the coordinator, and tell its fingerprint by telephone, not by mail:")
    _say(f"  {made.fingerprint}")


def install(
    site: Site,
    answer: Annotated[Path, typer.Argument(metavar="ANSWER", help="what the coordinator sent")],
    fingerprint: Annotated[str, typer.Option(metavar="SHA256:…", help="as the coordinator told it by telephone")],
    again: Annotated[bool, typer.Option("--again", help="take the place of the kit that is there: a renewal")] = False,
) -> None:
    """Make the site's kit from the coordinator's answer.

    It has the safe policies: `fedtailor deploy doctor` checks them.
    """
    from fedtailor.sites.kits import install as make

    kit = make(site, answer, fingerprint, again)
    _say(f"The kit is in {kit}. Check it with `fedtailor deploy doctor {site}`, then `fedtailor site start {site}`.")


def renew(kits: Kits) -> None:
    """Make new keys and certificates of the server and the admin, before theirs end. Sites need nothing new."""
    from fedtailor.sites.kits import renew_kits

    plan = renew_kits(kits)
    _say(f"The kits of the server and the admin of {plan.name} are new, and so are their keys.")
    _say(f"Put {kits / 'server'} and {kits / 'admin'} on the server in the place of the old ones, and start it again.")


def revoke(
    kits: Kits, site: Annotated[str, typer.Argument(metavar="SITE", help="whose certificates no longer count")]
) -> None:
    """Revoke all certificates that a site has so far: its key was stolen, or it left.

    The server refuses them within half a minute. The site may ask again, with a new key: `approve --again`.
    """
    from fedtailor.sites.kits import revoke as withdraw

    file = withdraw(kits, site)
    _say(f"All certificates of {site} so far are revoked, by {file}.")
    _say("Copy this file to the same place in the server's kit, if that is on another machine: no restart is needed.")


def share(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run directory of a federation")],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="a new directory, to be sent")],
) -> None:
    """Write what a hospital that comes later needs for `fedtailor adapt`: what every site was sent, and no more.

    No declared fact, metric or upload of a site is in it; their names are.
    """
    from fedtailor.model_files.handover import hand_over

    round = hand_over(run, to)
    _say(f"The model of round {round} is in {to}: for `fedtailor adapt {to} --data FILE --to DIR`.")


def doctor(
    kit: Annotated[Path, typer.Argument(metavar="KIT", help="a kit, a site's file, or a site's directory")],
) -> None:
    """Check a kit, or a running site, for unsafe settings and old certificates.

    For each it says how to mend it. The exit code is 1 if there is any. For fedtailor itself and its machine
    there is another command: fedtailor doctor.
    """
    from fedtailor.sites.kits import doctor as look

    found = look(kit)
    for number, finding in enumerate(found, 1):
        _say(f"{number}. {finding.what}")
        _say(f"   Mend it: {finding.mend}")
    if found:
        raise typer.Exit(1)
    _say(f"{kit}: nothing found.")


def _say(text: str) -> None:
    screen.print(visible(text), soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _code(plan: "Plan") -> str:
    """Say whether the plan names code that is not of the catalogue."""
    from fedtailor.engines.own_code import named_code

    terms = plan.terms()
    own = list(named_code(terms).values())
    if not own:
        return f"All of the catalogue: method {terms.method}, network {terms.model}, loss {terms.loss}."
    return (
        f"Named code: {', '.join(own)}. Each site must have it installed, and name it under allow in its site.toml; "
        "nothing is sent."
    )
