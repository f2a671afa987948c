"""A page of a few lines for each role, and a site's file to fill in."""

from fedtailor.experiment import Experiment
from fedtailor.sites.kits.project import ADMIN, DAYS, SERVER
from fedtailor.sites.plan import Plan
from fedtailor.sites.site_file import SiteFile

EXAMPLES = {
    "epsilon": "8.0",
    "data": '"patients.csv"',
    "label_column": '"diagnosis"',
    "group": '"patient_id"',
    "columns": '"age=number"',
}
OFFERED = (
    "label_column",
    "group",
    "columns",
    "allow",
    "metrics",
    "epsilon",
    "threads",
    "device",
)  # in a site's file, as comments


def page(plan: Plan, name: str, central: bool) -> str:
    """The page of a role: what to run, and what opens."""
    make = _server_page if name == SERVER else _admin_page if name == ADMIN else _site_page
    return make(plan, name, central)


def _server_page(plan: Plan, name: str, central: bool) -> str:
    return f"""# The server of the federation {plan.name}

Sites: {", ".join(plan.sites)}. The directory `kit` has the server's private key: nobody else may read it.

1. Put this directory and that of the admin on {plan.server}, side by side, and install fedtailor there:
   `pip install 'fedtailor[nvflare]'` (in a clone: `'.[nvflare]'`).
2. Check it: `fedtailor deploy doctor kit`.
3. Run the federation: `fedtailor deploy run federation.toml`. Ctrl-C ends it, the same command goes on.

What opens: port {plan.port}, incoming, TCP with mutual TLS. Nothing else.

{_keys(central)}
Certificates last {DAYS} days; the doctor says when one ends.
"""


def _admin_page(plan: Plan, name: str, central: bool) -> str:
    return f"""# The admin of the federation {plan.name}: {plan.admin}

With the key in `kit` runs are started and ended, and nothing else: it reads no file of a site and sends it no code.

1. Keep this directory beside the server's: `fedtailor deploy run` uses it.
2. Check it: `fedtailor deploy doctor kit`.

What opens: nothing. The admin connects to {plan.server}, port {plan.port}.

{_keys(central)}
Certificates last {DAYS} days; the doctor says when one ends.
"""


def _site_page(plan: Plan, name: str, central: bool) -> str:
    ask = (
        "3. The key is in `kit` already, made by the coordinator: this is for trials."
        if central
        else f"""3. Make your key, which stays here, and ask for a certificate: `fedtailor site request site.toml`. Send
   `{name}.request.zip` to the coordinator, and tell the fingerprint that is printed by telephone.
4. When the answer comes, ask the coordinator for its fingerprint by telephone, and install it:
   `fedtailor site install site.toml {name}.answer.zip --fingerprint SHA256:…`."""
    )
    number = 4 if central else 5
    return f"""# The site {name} of the federation {plan.name}

1. Install fedtailor: `pip install 'fedtailor[nvflare]'` (in a clone: `'.[nvflare]'`).
   Put your data's path into `site.toml`.
2. See what would leave your house, before anything is joined: `fedtailor site check site.toml`.
{ask}
{number}. Check the kit: `fedtailor deploy doctor site.toml`.
{number + 1}. Take part: `fedtailor site start site.toml`. Ctrl-C ends it, the same command goes on.

What opens: one outgoing connection, to {plan.server}, port {plan.port}, TCP with mutual TLS. Nothing incoming.

{_keys(central)}
Certificates last {DAYS} days; the doctor says when yours ends.
"""


def _keys(central: bool) -> str:
    if central:
        return (
            "All private keys were made by the coordinator, who can pass for any site: **for trials only**.\n"
            "They are locked away in `ca` there (mode 0600), and each kit is closed to other users of its machine."
        )
    return "Each private key was made where it is used and never left. The coordinator alone has the root's."


def site_template(plan: Plan, name: str) -> str:
    """A site's file, to be filled in."""
    lines = [
        f"# The site {name} of the federation {plan.name}. Paths are relative to this file; nothing in it is sent.",
        f'name = "{name}"',
        *_setting("plan"),
        *_setting("kit"),
        *_setting("data"),
        *_setting("directory"),
        "",
        "# Settings that you may need: take away the # before the name.",
        *(line for setting in OFFERED for line in _setting(setting, offered=True)),
    ]
    return "\n".join(lines) + "\n"


def _setting(name: str, offered: bool = False) -> list[str]:
    field = SiteFile.model_fields[name]
    described = field.description or Experiment.model_fields[name].description
    value = EXAMPLES.get(name) or (f'"{field.default}"' if isinstance(field.default, str) else str(field.default))
    return ["", f"# {described}", f"{'# ' if offered else ''}{name} = {'[]' if value == '()' else value}"]
