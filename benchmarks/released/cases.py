"""The trainings: what is changed in each release, and what of ours stands beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.released.surroundings import Changes
from benchmarks.released.trainings import PFedGraph, PFLlib, PGFed, Variant

CLIENTS, SERVERS = "flcore/clients/client", "flcore/servers/server"
PLAIN = "as released"


@dataclass(frozen=True)
class Case:
    """A release, how it is run, and what of ours stands beside it."""

    project: str
    runner: PFLlib | PGFed | PFedGraph
    variants: Sequence[Variant]
    ours: Sequence[tuple[str, Mapping[str, Any]]]  # methods with their settings
    task: Mapping[str, Any] = field(default_factory=dict)  # what differs from TASK, for both
    average: str = "sample"


def flags(*given: str) -> Variant:
    return Variant(" ".join(given), given)


def repaired(label: str, changes: Changes, *given: str, network: str = "") -> Variant:
    return Variant(f"{' '.join(given)} + {label}" if given else label, given, changes, network)


def of_pfedme(server: Any) -> str:
    """What a client calls its personal model, against the global model."""
    server.send_models()
    glob = list(server.global_model.parameters())
    apart = [
        (p - g).abs().max() for client in server.clients for p, g in zip(client.personalized_params, glob, strict=True)
    ]
    return f"largest difference between a personal and the global model: {float(torch.stack(apart).max()):.2g}"


@torch.no_grad()
def of_fedcp(server: Any) -> str:
    """Predictions of the same samples by the same models, twice."""
    differ = samples = 0
    for client in server.clients:
        client.model.eval()
        for x, y in client.load_test_data():
            first, second = (client.model(x, is_rep=False, context=client.context).argmax(1) for _ in range(2))
            differ, samples = differ + int((first != second).sum()), samples + len(y)
    return f"{100 * differ / samples:.1f} % of the predictions differ when they are made again"


def of_fedas(server: Any) -> str:
    """How far the server's own body goes while it is sent to all clients."""
    before = torch.cat([p.detach().flatten() for p in server.global_model.base.parameters()])
    server.send_selected_models(range(len(server.clients)), 0)
    after = torch.cat([p.detach().flatten() for p in server.global_model.base.parameters()])
    return f"the server's body moves by {100 * float((after - before).norm() / before.norm()):.2f} % while it is sent"


COPIED = ("client.set_parameters(self.global_model, progress)",
          "client.set_parameters(copy.deepcopy(self.global_model), progress)")  # fmt: skip
BY_SAMPLE = [
    ("enumerate(self.load_train_data())", "enumerate(self.load_train_data(batch_size=1))"),
    (
        "self.fim_trace_history.append(fim_trace_sum.item())",
        "self.fim_trace_history.append(fim_trace_sum.item() / (i + 1))",
    ),
]
OWN_COPY = {
    f"{CLIENTS}pFedMe.py": [
        ("= self.optimizer.step(self.local_params, self.device)",
         "= [p.detach().clone() for p in self.optimizer.step(self.local_params, self.device)]"),
    ]
}  # fmt: skip
WHOLE_MEAN = {  # a running mean that began at 0 is too small by this factor
    f"{SERVERS}dbe.py": [
        ("self.clients[cid].running_mean * w",
         "self.clients[cid].running_mean / (1 - (1 - args.momentum) ** self.clients[cid].num_batches_tracked) * w"),
    ]
}  # fmt: skip
BY_SIZE = {f"{SERVERS}ntd.py": [("def add_parameters(self, _,", "def plain_mean(self, _,")]}
PLAIN_MEAN = {
    f"{SERVERS}base.py": [
        ("tot_samples += client.train_samples", "tot_samples += 1"),
        ("self.uploaded_weights.append(client.train_samples)", "self.uploaded_weights.append(1)"),
    ]
}
CORE = {
    f"{SERVERS}apple.py": [
        ("import torch\nimport time", "import copy\nimport torch\nimport time"),
        ("client.set_models(self.client_models)", "client.set_models(copy.deepcopy(self.client_models))"),
    ],
    f"{CLIENTS}apple.py": [
        ("            param_c.data = param_.data.clone()\n\n        self.model_c = copy.deepcopy(self.model)",
         "            param_.data = param_c.data.clone()\n"),
        ("torch.mean(param.grad * param_c)", "torch.sum(param.grad * param_c)"),
        ("p_grad = p_grad / cnt\n", "pass\n"),
    ],
}  # fmt: skip
OWN_COUNTS = (
    "torch.tile(val, (args.batch_size, 1))",
    "torch.tile(args.tau * client.sample_per_class.clamp(min=1) ** (-1/4), (args.batch_size, 1))",
)
NO_NOISE = {
    f"{SERVERS}cp.py": [
        ("x = F.gumbel_softmax(x, dim=1, tau=tau, hard=hard)",
         "x = F.gumbel_softmax(x, dim=1, tau=tau, hard=hard) if self.training else F.softmax(x / tau, dim=1)"),
    ]
}  # fmt: skip
LOGITS = {
    "flcore/trainmodel/models.py": [("        x = F.log_softmax(x, dim=1)\n        return x", "        return x")]
}
TOWARDS = {"pfedgraph_cosine.py": [("loss2 = args.lam * torch.dot", "loss2 = -args.lam * torch.dot")]}

TRAININGS: dict[str, Case] = {
    "fedntd": Case(
        "PFLlib", PFLlib("FedNTD", "flcore.servers.serverntd:FedNTD"),
        [Variant(PLAIN), flags("-bt", "1"), repaired("mean by samples, as ours", BY_SIZE, "-bt", "1")],
        [("fedntd", {}), ("fedavg", {})],
    ),
    "feddbe": Case(
        "PFLlib", PFLlib("FedDBE", "flcore.servers.serverdbe:FedDBE", split=True),
        [
            Variant(PLAIN), flags("-klw", "50"), repaired("the whole mean as r_g, as ours", WHOLE_MEAN, "-klw", "50"),
            flags("-klw", "50", "-mo", "1"),
        ],
        [("feddbe", {"kappa": 0.0, "rounds": 11}), ("feddbe", {"rounds": 11}), ("feddbe", {"mu": 1.0, "rounds": 11})],
    ),
    "dnn": Case(
        "PFLlib", PFLlib("FedAvg", "flcore.servers.serveravg:FedAvg", split=True),
        [
            Variant(f"FedAvg, {PLAIN}, -m DNN", network="DNN"),
            repaired("FedAvg, -m DNN without log_softmax", LOGITS, network="DNN"),
        ],
        [("fedavg", {})],
    ),
    "fedphp": Case(
        "PFLlib", PFLlib("FedPHP", "flcore.servers.serverphp:FedPHP", split=True, after=True),
        [Variant(PLAIN), flags("-lam", "0.1", "-mu", "0.1")],
        [("fedavg-ft", {}), ("local", {})],
    ),
    "apple": Case(
        "PFLlib", PFLlib("APPLE", "flcore.servers.serverapple:APPLE"),
        [Variant(PLAIN), flags("-dlr", "0.001"), repaired("cores and inner products", CORE, "-dlr", "0.001")],
        [("fedavg", {}), ("local", {})],
    ),
    "fedcac": Case(
        "PFLlib", PFLlib("FedCAC", "flcore.servers.servercac:FedCAC"),
        [
            Variant(PLAIN), flags("-bt", "100"), flags("-bt", "100", "-tau", "0.5"),
            Variant(
                "-bt 100 -tau 0.5 + evaluated after local work, as ours", ("-bt", "100", "-tau", "0.5"),
                {f"{SERVERS}cac.py": [("self.receive_models()", "self.evaluate()\n            self.receive_models()")]},
                after=True,
            ),
        ],
        [("fedcac", {}), ("local", {})],
    ),
    "pfedme": Case(  # the rate of the personal steps is the task's, as it is for all others
        "PFLlib",
        PFLlib("pFedMe", "flcore.servers.serverpFedMe:pFedMe", scores="rs_test_acc_per", fact=of_pfedme),
        [
            Variant(f"{PLAIN}, -lrp 0.1", ("-lrp", "0.1")), flags("-lrp", "0.1", "-bt", "1"),
            repaired("a copy of θ̃", OWN_COPY, "-lrp", "0.1", "-bt", "1"),
            repaired("a copy of θ̃, plain mean", {**OWN_COPY, **PLAIN_MEAN}, "-lrp", "0.1", "-bt", "1"),
        ],
        [("pfedme", {"lam": 1.0, "outer_lr": 0.1, "prox_steps": 5, "weight_decay": 0.001})],
    ),
    "fedala": Case(
        "PFLlib", PFLlib("FedALA", "flcore.servers.serverala:FedALA", after=True),
        [Variant(PLAIN), flags("-p", "1"), flags("-p", "4")],
        [("fedala", {}), ("fedala", {"p": 2}), ("fedavg-ft", {})],
    ),
    "fedas": Case(
        "PFLlib", PFLlib("FedAS", "flcore.servers.serveras:FedAS", split=True, fact=of_fedas),
        [
            Variant(PLAIN),
            repaired("a copy for each client", {f"{SERVERS}as.py": [COPIED]}),
            repaired("a copy, Fisher by samples", {f"{SERVERS}as.py": [COPIED], f"{CLIENTS}as.py": BY_SAMPLE}),
        ],
        [("fedas", {}), ("fedas", {"weighting": "batches"})],
    ),
    "fedcp": Case(
        "PFLlib", PFLlib("FedCP", "flcore.servers.servercp:FedCP", split=True, fact=of_fedcp),
        [Variant(PLAIN), repaired("no noise in a test", NO_NOISE)],
        [("fedcp", {})],
    ),
    "fedlc": Case(
        "PFLlib", PFLlib("FedLC", "flcore.servers.serverlc:FedLC", split=True),
        [Variant(PLAIN), repaired("each client's own counts", {f"{SERVERS}lc.py": [OWN_COUNTS]})],
        [("fedlc", {}), ("fedavg", {})],
    ),
    "scaffold": Case(
        "PFLlib", PFLlib("SCAFFOLD", "flcore.servers.serverscaffold:SCAFFOLD"),
        [Variant(PLAIN)],
        [("scaffold", {})],
    ),
    "pgfed": Case(
        "PGFed", PGFed(),
        [
            Variant(PLAIN), flags("-mu", "0.1", "-lam", "0.01"),
            flags("-algo", "PGFed", "-mu", "0.1", "-lam", "0.01", "-bt", "0.5"),  # its example's command for PGFedMo
            flags("-algo", "PGFedMo", "-mu", "0.1", "-lam", "0.01", "-bt", "0.5"),
        ],
        [("pgfed", {"mu": 0.1}), ("pgfedmo", {"mu": 0.1, "beta": 0.5}), ("fedavg", {"evaluate_model": "local"})],
        {"lr": 0.01, "momentum": 0.9, "keep_momentum": True}, "client",
    ),
    "pfedgraph": Case(
        "pFedGraph", PFedGraph(),
        [
            Variant(PLAIN), repaired("towards the mix", TOWARDS),
            flags("-lam", "100"), repaired("towards the mix", TOWARDS, "-lam", "100"),
        ],
        [("pfedgraph", {"lam": lam}) for lam in (-0.01, 0.01, -100.0, 100.0)],
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "steps": 12},
    ),
}  # fmt: skip
