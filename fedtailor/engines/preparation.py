"""From an experiment to all that its first round needs: data, network, terms. Every check that needs no round is made
here, before the first file is written.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedtailor._common.errors import FedtailorError, explained, unknown
from fedtailor._common.imports import import_object
from fedtailor.client.private_queries import private_queries
from fedtailor.client.secure_party import Identity, Party, pinned
from fedtailor.client.terms import Terms, check_training, class_weights, optimizer_settings, stack_size, training_loss
from fedtailor.data import Assignment, DataObject, Dataset, FederatedData, federate, from_list, load
from fedtailor.data.frames import is_frames
from fedtailor.data.preprocessing import Preprocessing
from fedtailor.data.sources import names_code
from fedtailor.data.table import Purpose, TableSettings, from_frame
from fedtailor.engines.devices import check_several_devices, find_devices
from fedtailor.engines.fit import fit_inputs, try_out
from fedtailor.engines.hostile import hostile_clients
from fedtailor.engines.own_metrics import deciding_metric, more_metrics, try_out_metrics
from fedtailor.engines.trackers import check_trackers
from fedtailor.experiment import NONE, TABLE_SETTINGS, Experiment
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.fairness import LOSS
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.privacy import Privacy
from fedtailor.messages import Message, State, message_bytes
from fedtailor.messages.store import Store
from fedtailor.method import Layout, Method, Server, expected_upload
from fedtailor.methods import find_method
from fedtailor.models import ModelLike, build_model, wants_tokens
from fedtailor.models.assembly import Assembled, assemble
from fedtailor.server.aggregation.fairness import check_fairness
from fedtailor.server.aggregation.robust import check_aggregation
from fedtailor.server.aggregation.secure import check_secure
from fedtailor.server.aggregation.server_optimizer import check_server_optimizer
from fedtailor.server.budget import Budget, settled, wanted_privacy
from fedtailor.server.flight import check_uneven
from fedtailor.server.setup import Setup, describe_layers, describe_uploads
from fedtailor.training.augmentation import Augmentation
from fedtailor.training.inputs import CPU, held, sample_shape
from fedtailor.training.network import Loss
from fedtailor.training.predictions import OwnMetric
from fedtailor.training.streams import numpy_stream, torch_seed

LOSSES: dict[str, Loss] = {
    "cross-entropy": functional.cross_entropy,
    "mse": functional.mse_loss,
    "bce": functional.binary_cross_entropy_with_logits,
}
AT_SITES = "no site could keep its model in a file; take another method for real sites"


@dataclass
class Objects:
    """Python objects in place of names in the experiment."""

    method: Method | None = None
    data: DataObject | FederatedData | None = None
    model: ModelLike | None = None
    loss: Loss | None = None
    metric: OwnMetric | None = None
    metrics: Mapping[str, OwnMetric] | None = None  # beside that one, by name
    partition: Assignment | None = None

    @property
    def given(self) -> bool:
        """True if there are any."""
        return any(value is not None for value in vars(self).values())

    def by_kind(self) -> dict[str, Any]:
        """All that are given; each of the metrics as `metric NAME`."""
        given = {kind: value for kind, value in vars(self).items() if value is not None and kind != "metrics"}
        return given | {f"metric {name}": metric for name, metric in (self.metrics or {}).items()}


@dataclass(frozen=True)
class Initialiser:
    """Makes initial vectors of a network as other seeds would have made them.

    It has a copy of the network: in that of the sites are traces of the clients' work.
    """

    _assembled: Assembled
    _seed: int

    def __call__(self, number: int) -> Tensor:
        return self._assembled.network().initialised(torch_seed(self._seed, "another", number))


@dataclass
class Prepared:
    """An experiment with its data and its network in place, before its first round."""

    experiment: Experiment
    data: FederatedData
    terms: Terms
    assembled: Assembled
    budget: Budget | None = None
    hostile: list[int] = field(default_factory=list)  # clients, if the experiment has an attack

    @property
    def class_weights(self) -> list[float]:
        """The weight of each class in the training loss; none if all are alike."""
        wanted = self.experiment.class_weights
        return [] if wanted == "none" else class_weights(wanted, self.data).tolist()

    @property
    def evaluated(self) -> Sequence[int]:
        """The clients that may be evaluated, in order. A sample of them stays the same when clients join."""
        whom, training, first = self.experiment.evaluation.clients, self.data.n_training, self.data.n_at_first
        if not isinstance(whom, int):
            return range(training, self.data.n_clients) if whom == "new" else range(training)
        if whom > first:
            raise FedtailorError(f"{whom} clients cannot be evaluated: there are only {first}.")
        drawn: list[int] = numpy_stream(self.experiment.seed, "evaluated").choice(first, whom, replace=False).tolist()
        return sorted(drawn)

    def copied_terms(self) -> Terms:
        """The terms for a site that shares no memory with anything here."""
        network = self.assembled.network()
        network.autocast = self.terms.network.autocast
        method, initial = self.terms.method.model_copy(deep=True), self.terms.initial.clone()
        return replace(self.terms, method=method, network=network, initial=initial)

    def parties(self, run: str, names: Sequence[str], certificate: bytes = b"") -> Sequence[Party]:
        """The simulated sites of these names in secure aggregation."""
        identities = pinned(names, certificate)
        return [self.party(run, names, number, identities[name]) for number, name in enumerate(names)]

    def party(
        self,
        run: str,
        names: Sequence[str],
        number: int,
        identity: Identity,
        opened: Callable[[int, str], str] | None = None,
    ) -> Party:
        """One site in secure aggregation: who takes part in a round follows from the experiment."""
        draw = Participation.parse(self.experiment.participation).draw
        return Party(run, names, number, identity, partial(draw, self.data.n_training, self.experiment.seed), opened)

    def server(self, n_samples: Sequence[int], store: Store) -> Server:
        """The server of sites that have so many training samples."""
        terms = self.terms
        return Server(
            terms.initial.clone(),
            copy.deepcopy(terms.network.layout),
            torch.tensor(n_samples, device=terms.initial.device),
            terms.participation * len(n_samples),
            store=store,
            initialise=Initialiser(self.assembled, self.experiment.seed),
        )

    def private_queries(self, n_samples: int) -> dict[float, int]:
        """Count the private gradients that a client with so many samples asks for in a round, by sampling rate."""
        server = _started(self)
        server.round, server.participants = 1, [0]
        message = self.terms.method.send_all(server)[0]
        return private_queries(self.terms, message, n_samples)

    @cached_property
    def setup(self) -> Setup:
        """The layers of the network, and what a client uploads in round 1."""
        experiment, done, terms = self.experiment, self.assembled, self.terms
        notes = [*done.doubts, *([f"Weights: {done.loaded}."] if done.loaded else [])]
        if done.lora:
            notes.append(f"LoRA: {done.lora}, in {len(done.adapted)} layers: {done.adapted[0]} … {done.adapted[-1]}.")
        if self.budget:
            notes.append(self.budget.in_words(experiment.rounds))
        upload: Message | None = None  # tensors like those of round 1, if the method can say
        try:
            server = _started(self)
            server.round = 1
            left_out = terms.method.recorded if terms.privacy else set()
            expected = expected_upload(terms.method, server, 0)
            expected |= {LOSS: torch.zeros((), dtype=torch.float64)} if terms.fair else {}
            upload = {name: tensor for name, tensor in expected.items() if name not in left_out}
        except FedtailorError:  # refused, before there is a run directory
            raise
        except Exception:  # a method's own fault, of any kind: it is named when the method starts
            pass
        return Setup(
            network=experiment.model,
            layers=describe_layers(terms.network),
            notes=notes,
            method=experiment.method,
            title=terms.method.title if ":" in experiment.method else "",
            uploads=describe_uploads(terms.method, terms.privacy, terms.fair),
            numbers=None if upload is None else sum(tensor.numel() for tensor in upload.values()),
            bytes=None if upload is None else message_bytes(upload),
        )


def _started(prepared: Prepared) -> Server:
    """A server on which the method was started, to look at."""
    server = prepared.server(prepared.data.n_samples[: prepared.data.n_training].tolist(), Store(None, "server"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it has to say is said when the run begins
        prepared.terms.method.model_copy(deep=True).start(server)
    return server


def prepare(experiment: Experiment, objects: Objects, site: bool = False) -> Prepared:
    """Load, partition and build all that a run needs, so that nothing wrong is found out later.

    For one `site` of a federation, the samples of the others are not there, and the protocol is the server's to check.
    """
    check_trackers(experiment.track)
    devices = find_devices(experiment.device)
    if len(devices) > 1:
        check_several_devices(experiment, site)
    device = devices[0] if len(devices) == 1 else CPU  # of several, each worker moves its own there
    method = objects.method or find_method(experiment.method, experiment.parameters)
    data = partition_data(experiment, objects.data, partition=objects.partition).to(device)
    check_training(experiment, method, data, devices[0])
    if site or data.elsewhere is not None:
        method.check_one_model(AT_SITES)
    training = data.n_training
    if experiment.secure and not site:
        check_secure(experiment, method, training)
    if not site:
        check_uneven(experiment, method, training, data.elsewhere is not None)
    if experiment.aggregation != "mean":
        check_aggregation(experiment, method, training)
    if experiment.fairness != NONE and not site:
        check_fairness(experiment, method)
    loss = objects.loss or find_loss(experiment.loss, data)
    model, shape, dtype = objects.model or experiment.model, sample_shape(data.x), getattr(torch, experiment.dtype)
    augmentation = Augmentation.parse(experiment.augment) if experiment.augment else None
    if augmentation is not None:
        augmentation.check(shape)
    tokens = data.vocabulary if wants_tokens(model) else None
    module = build_model(model, shape, data.n_outputs, experiment.seed, tokens=tokens)
    data = fit_inputs(data, module, dtype)
    assembled = assemble(
        module.to(device=device, dtype=dtype),
        experiment.head,
        held(data.x[:2]),
        weights=experiment.weights,
        frozen=experiment.frozen,
        lora=experiment.lora,
        seed=experiment.seed,
    )
    network = assembled.network()
    if network.has_batch_norm and experiment.batch == 1:
        raise FedtailorError("BatchNorm needs other samples in a batch: set --batch to 2 or more.")
    network.autocast = experiment.autocast
    scores = try_out(network, data, loss)
    assembled = replace(assembled, sizes=network.sizes(held(data.x[:2]), scores))
    assembled = replace(assembled, extra=_extra_tensors(method, assembled.network().layout, experiment.seed))
    network = assembled.network()
    network.autocast = experiment.autocast
    more = more_metrics(experiment.evaluation.metrics or {}, objects.metrics or {})
    metric, own_metric = deciding_metric(experiment.evaluation.metric, objects.metric, data, scores, more)
    initial = network.vector.clone()
    participation, rule = Participation.parse(experiment.participation), Rule.parse(experiment.aggregation)
    per_round = participation.mean(training)
    private = experiment.privacy is not None or experiment.epsilon is not None
    privacy = wanted_privacy(experiment, method, network.layout) if private else None
    terms = Terms(
        method,
        network,
        initial,
        loss,
        training_loss(experiment, loss, data, network),
        optimizer_settings(experiment, network),
        experiment.keep_momentum,
        experiment.evaluation.fine_tune,
        experiment.seed,
        per_round / training,
        experiment.schedule,
        experiment.rounds,
        experiment.evaluation.train,
        experiment.debug,
        assembled.loaded.sha256 if assembled.loaded else "",
        augmentation,
        metric,
        own_metric,
        more,
        data.targets == "labels",
        privacy,
        per_round,
        secure=experiment.secure and bool(method.means),
        norm_bound=rule.amount if experiment.secure and rule.kind == "norm-bound" else None,
        matmul_precision=experiment.matmul_precision,
        fair=experiment.fairness != NONE,
    )
    if not site and data.elsewhere is None:
        terms.stack = stack_size(experiment, network, data, terms.training_loss, devices[0].type == "cpu")
    prepared = Prepared(experiment, data, terms, assembled)
    if privacy is not None and not site:  # a site gets the noise from the plan
        prepared = _with_budget(prepared, privacy, participation, training)
    if not site:
        _check_protocol(prepared)
        check_server_optimizer(experiment, method, partial(_started, prepared))
        if experiment.attack is not None:
            prepared.hostile = hostile_clients(experiment, data)
    if own_metric is not None or more:
        try_out_metrics(data, terms)
    return prepared


def _extra_tensors(method: Method, layout: Layout, seed: int) -> State:
    """Make the tensors that the method trains beside the network; what it draws depends on the seed."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "extra tensors"))
        found = method.extra_tensors(layout)
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise FedtailorError(
                f"{type(method).__name__}, extra_tensors: {name!r} is no tensor of floating-point numbers."
            )
    return found


def _with_budget(prepared: Prepared, privacy: Privacy, participation: Participation, clients: int) -> Prepared:
    """Settle the privacy of a run: its noise, and what it may cost."""
    experiment, method = prepared.experiment, prepared.terms.method
    queries: list[dict[float, int]] = []
    if privacy.level == "sample" and method.uploads:
        sizes = prepared.data.n_samples.tolist()[:clients]
        of_size = {size: prepared.private_queries(size) for size in sorted(set(sizes))}  # or the method is refused
        queries = [of_size[size] for size in sizes]
    limit = None if isinstance(experiment.epsilon, str) else experiment.epsilon
    budget = settled(experiment, Budget(privacy, participation, clients, bool(method.uploads), limit, queries))
    return replace(prepared, budget=budget, terms=replace(prepared.terms, privacy=budget.privacy))


def _check_protocol(prepared: Prepared) -> None:
    """Refuse an evaluation of something that there is not."""
    protocol, method, data = prepared.experiment.evaluation, prepared.terms.method, prepared.data
    if not protocol.every:
        if protocol.patience is not None:
            raise FedtailorError("Nothing is evaluated to stop early by: leave --patience or --evaluate-every 0 out.")
        return
    if protocol.fine_tune and protocol.model != "global":
        method.check_one_model("leave --fine-tune out")
    if protocol.clients == "new" and not data.new:
        raise FedtailorError("There are no new clients to evaluate: hold some out with --new-clients.")
    _, trained, validated, end = data.places[[*prepared.evaluated]].T
    if not (end > validated).any():
        raise FedtailorError(
            "No client has test samples, so nothing could be measured: give --test 0.2, or --evaluate-every 0 to train "
            "without measuring."
        )
    validating = (validated > trained).any()
    if protocol.patience is not None and not validating:
        raise FedtailorError("No client has validation samples to stop early by (--patience): give --validation 0.1.")
    if protocol.choose == "best-validation" and not validating:
        raise FedtailorError("No client has validation samples to choose the best round by: give --validation 0.1.")
    if protocol.clients == "new" and protocol.model == "local":
        raise FedtailorError("New clients do no local work in a round: evaluate their personal or the global model.")
    if protocol.model == "global" and method.global_model(_started(prepared)) is None:
        raise FedtailorError(
            f"The method {prepared.experiment.method} has no global model: evaluate the personal ones."
        )


def partition_data(
    experiment: Experiment,
    given: Any = None,
    table: Preprocessing | None = None,
    partition: Assignment | None = None,
) -> FederatedData:
    """The experiment's data, or what is given in their place: loaded and partitioned among its clients, if they are
    not yet (on the CPU: the same for every device).

    `table` is the preprocessing of an earlier federation, and `partition` a function, in place of the experiment's.
    """
    if isinstance(given, FederatedData):
        return given.aligned()
    with torch.device("cpu"):
        dataset = load_dataset(experiment, given)
        return federate(
            dataset,
            partition=partition or experiment.partition or ("dirichlet:0.3" if dataset.client is None else "natural"),
            clients=experiment.clients,
            seed=experiment.seed,
            test=experiment.test,
            validation=experiment.validation,
            split=experiment.split,
            stratify=experiment.stratify,
            min_samples=experiment.min_samples,
            max_train=experiment.max_train,
            new_clients=experiment.new_clients,
            pixels=experiment.pixels,
            labels=experiment.labels,
            preprocessing=table or experiment.preprocessing,
            rare=experiment.rare,
            dtype=getattr(torch, experiment.dtype),
        )


def load_dataset(
    experiment: Experiment, given: Any = None, knows: Mapping[str, str] | None = None, gaps: bool = False
) -> Dataset:
    """Load the experiment's data, or make a data set of what is given in their place, or returned by code that is.
    `knows` has the kinds of the columns of an earlier table; with `gaps`, most classes of a list may be missing."""
    name = None
    if given is None and names_code(experiment.data, experiment.data_dir):
        given = import_object(experiment.data, "data")
    if callable(given):
        given, name = _returned(given, experiment.data), experiment.data
    if isinstance(given, Dataset):
        return given
    table: TableSettings = {name: getattr(experiment, name) for name in TABLE_SETTINGS}  # type: ignore[assignment]
    regression = experiment.loss == "mse"
    if given is None:
        return load(
            experiment.data,
            experiment.data_dir,
            image_size=experiment.image_size,
            regression=regression,
            knows=knows,
            **table,
        )
    if is_frames(given):
        return from_frame(given, table, Purpose(regression=regression, knows=knows), name or "table")
    return from_list(given, name, gaps)


def _returned(function: Callable[[], Any], name: str) -> Any:
    """Call a function that returns data."""
    try:
        return function()
    except Exception as error:  # whatever the user's code does
        raise FedtailorError(f"The data {name} cannot be made: {explained(error)}.") from error


def find_loss(name: str, data: FederatedData) -> Loss:
    """The loss of this name; refuse cross-entropy for targets that are not one class a sample."""
    if name == "cross-entropy" and data.targets == "numbers":
        raise FedtailorError(
            "The loss cross-entropy is for classes, but these targets are floating-point numbers: take --loss mse, or "
            "give the labels as whole numbers."
        )
    if name == "cross-entropy" and data.targets == "labels":
        raise FedtailorError(
            "The loss cross-entropy is for one class a sample, but these samples have several labels: take --loss bce."
        )
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise unknown("loss", name, LOSSES)
    found = import_object(name, "loss")
    if isinstance(found, type) and issubclass(found, nn.Module):
        found = found()
    if not callable(found):
        raise FedtailorError(f"The loss {name} is not a function of (outputs, targets).")
    return found  # type: ignore[no-any-return]
