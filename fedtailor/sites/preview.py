"""`fedtailor site check`: what a site has, what keeps it from joining, and exactly what would leave it.

Nothing is sent and nothing is written. What a site declares is made by the code that declares it; the letters of the
rounds are those of a rehearsal in memory.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from fedtailor._common.errors import FedtailorError
from fedtailor._common.files import read_bytes
from fedtailor.client.private_queries import cost_in_epsilon
from fedtailor.data.agreement import Agreement, Hello, agree_on
from fedtailor.messages.letters import FAULTS
from fedtailor.server.records import finite
from fedtailor.sites.declaration import declare
from fedtailor.sites.findings import Findings, in_site_file, look, with_rare
from fedtailor.sites.ledger import Account, Budget, account_of, refusal
from fedtailor.sites.plan import Disclosed, Plan
from fedtailor.sites.rehearsal import Rehearsal, rehearse
from fedtailor.sites.site_file import SECRET, SiteFile

RUN = "preview"  # the name of a run that never is
NEVER_LEAVES = (
    "rows, cells and labels; the counts of rows with a class or a value, unless declared above",
    "the state: what the method keeps here between the rounds, unless it is a tensor above",
    "its own model file, its predictions, and the metrics that it does not tell",
    "the texts of errors: the server learns their kind, the site's log says the rest",
    "site.toml, paths, keys and the site's secret",
)


@dataclass(frozen=True)
class Preview:
    """The exchange of a site with the server by a plan, and the reasons that keep it from joining."""

    site: str
    plan: Plan
    data: str
    tells: Disclosed
    findings: Findings
    hello: Hello | None = None  # None if there is nothing to declare yet
    secret: bool = False  # there is one already: the checksum is the one that will be declared
    rehearsal: Rehearsal | None = None
    account: Account | None = None  # of the privacy that was spent
    budget: Budget | None = None  # of a private plan
    open: tuple[str, ...] = ()  # what other sites decide about the sizes

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is told of a failure: one of these words."""
        return tuple(FAULTS)

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons that keep the site from joining."""
        return self.findings.problems

    def plain(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        findings = {name: value for name, value in vars(self.findings).items() if name not in ("dataset", "problems")}
        played = self.rehearsal
        return {
            "site": self.site,
            "federation": self.plan.name,
            "can_join": not self.problems,
            "problems": list(self.problems),
            "found": {**findings, "columns": [asdict(column) for column in self.findings.columns]},
            "declared": self.hello.model_dump(mode="json") if self.hello else None,
            "metrics": self.tells,
            "begin": {"down": [asdict(each) for each in played.begin], "up": ["site", "fingerprint"]}
            if played
            else None,
            "rounds": [asdict(each) for each in played.exchanges] if played else None,
            "end": {"up": ["site", "written"]},
            "privacy": self._privacy(),
            "faults": list(self.faults),
            "depends_on_other_sites": list(self.open),
            "never_leaves": list(NEVER_LEAVES),
        }

    def _privacy(self) -> dict[str, Any] | None:
        if (budget := self.budget) is None or self.account is None:
            return None
        before, run = (cost_in_epsilon(cost, budget.privacy) for cost in (self.account.cost, budget.run))
        return {
            "trainings": self.account.trainings,
            "spent": finite(before),
            "run": finite(run),
            "most": finite(budget.limit),
        }


def preview(site: SiteFile, plan: Plan) -> Preview:
    """Read a site's data, compare them with the plan, and find out what would leave."""
    findings = look(site, plan)
    secret = site.private / SECRET
    about = Preview(site.name, plan, site.data, site.tells(plan), findings, secret=secret.is_file())
    dataset = findings.dataset
    if findings.problems or dataset is None:  # code that the site does not allow is not run, for example
        return about
    try:
        hello = declare(site, plan, dataset, read_bytes(secret) if about.secret else b"")
        findings = with_rare(findings, _declared(hello, plan))
        about = replace(about, hello=hello, findings=findings, open=_open(hello, plan))
        rehearsal = rehearse(
            plan, plan.number(site.name), dataset, _alone(hello, plan), about.tells, _certificate(site)
        )
    except FedtailorError as error:
        return replace(about, findings=replace(findings, problems=(in_site_file(str(error)),)))
    about = replace(about, rehearsal=rehearsal)
    if budget := Budget.of(site, plan, rehearsal.training):
        try:
            account = account_of(site)
        except FedtailorError as error:
            return replace(about, findings=replace(findings, problems=(str(error),)))
        about = replace(about, account=account, budget=budget)
        if not budget.allows(account.cost):
            about = replace(about, findings=replace(findings, problems=(refusal(account, budget),)))
    return about


def _certificate(site: SiteFile) -> bytes:
    """The certificate that leaves in secure aggregation; nothing before there is one."""
    path = site.path(site.kit) / "startup" / "client.crt"
    return path.read_bytes() if path.is_file() else b""


def _declared(hello: Hello, plan: Plan) -> dict[str, int]:
    """Count the values that are declared of each category; those that the plan gives are not."""
    given = {name for name, values in (plan.features or {}).items() if not isinstance(values, str)}
    facts = [fact for fact in hello.facts or () if fact.kind == "category" and fact.name not in given]
    return {fact.name: len(fact.values) for fact in facts}


def _alone(hello: Hello, plan: Plan) -> Agreement:
    """Agree with sites that are all like this one."""
    experiment = plan.terms()
    return agree_on(
        RUN,
        [hello.model_copy(update={"name": name}) for name in plan.sites],
        classes=plan.classes,
        features=plan.features,
        how=experiment.preprocessing,
        own_labels=experiment.labels == "own",
    )


def _open(hello: Hello, plan: Plan) -> tuple[str, ...]:
    """Say what the other sites decide about the size of the network."""
    found = []
    if plan.terms().labels == "own":
        found.append("the largest number of classes that a site has")
    elif plan.classes is None and hello.targets == "classes":
        found.append("the classes of all sites")
    if _declared(hello, plan):
        found.append("the values that others declare of the categories")
    if hello.facts:
        found.append("the columns in which cells of others are missing")
    if hello.tokens is not None:
        found.append("the largest number of token values that a site has")
    return tuple(found)
