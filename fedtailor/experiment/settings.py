"""The settings of an experiment and of its evaluation: names, types, defaults, and what is refused."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedtailor._common.errors import FedtailorError
from fedtailor.experiment.aggregation_rule import Rule
from fedtailor.experiment.attack import Attack
from fedtailor.experiment.fairness import Fairness
from fedtailor.experiment.late import Late
from fedtailor.experiment.participation import Participation
from fedtailor.experiment.privacy import Privacy
from fedtailor.experiment.system import System, names_file
from fedtailor.training.metrics import ACCURACY, AUTO, Metric, named_metrics
from fedtailor.training.schedule import RateSchedule

# What decides about the clients and their samples (beside the seed).
DATA_SETTINGS = (
    "data", "data_dir", "clients", "partition", "split", "stratify", "test", "validation", "min_samples", "max_train",
    "new_clients", "pixels", "labels", "label_column", "client_column", "group", "split_column", "columns",
    "drop_unlabelled", "preprocessing", "rare", "separator", "decimal", "encoding", "image_size",
)  # fmt: skip
# What may be said of a table, such as a CSV file.
TABLE_SETTINGS = (
    "label_column", "client_column", "group", "split_column", "columns", "drop_unlabelled", "separator", "decimal",
    "encoding",
)  # fmt: skip
# What does not change a run's numbers: two experiments that differ in nothing else are the same run.
EXECUTION_ONLY = {
    "engine", "workers", "states", "checkpoint_every", "data_dir", "on_failure", "observe_limit", "track",
    "debug", "deadline", "address", "tensorboard",  # which older files have
}  # fmt: skip
# Where `tune` looks for settings of the experiment; a method declares the ranges of its own parameters.
SEARCH = {"lr": "0.001..1:log"}
# What may be said of the data of clients that join a finished run; the rest is the run's to say.
NEW_DATA_SETTINGS = tuple(
    name for name in DATA_SETTINGS if name not in ("new_clients", "pixels", "labels", "preprocessing", "rare")
)


MOST = 10**9  # of anything that is counted
NONE = "none"  # a setting that is off, where a grid or a command line has to say so
ADAM_LR = 0.001  # the default learning rate of adam and adamw


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Evaluation(_Strict):
    """The evaluation protocol: models, clients, averages, the metric and the round that counts. It is part of every
    result."""

    model: Literal["personal", "global", "local"] = Field(
        "personal",
        description="which model: each client's personal one, the global one, or local: a participant's model right "
        "after its local training, before the server aggregates",
    )
    fine_tune: int = Field(
        0, ge=0, le=MOST, description="epochs of fine-tuning on the client's own data before evaluation"
    )
    clients: Literal["all", "participants", "new"] | int = Field(
        "all",
        description="on whom: all training clients, so many of them (drawn from the seed, the same in every round), "
        "the round's participants, or the new clients held out",
    )
    average: Literal["client", "sample"] = Field(
        "client", description="the mean over clients, or over all test samples"
    )
    choose: Literal["last", "best-validation", "best-test", "last-5", "last-10"] = Field(
        "last",
        description="the round that counts as the result; last-5 and last-10 are the mean of the last five or ten "
        "evaluated rounds",
    )
    train: bool = Field(
        False, description="measure loss and accuracy on the training samples too, weighted by samples: the objective"
    )
    every: int = Field(1, ge=0, le=MOST, description="evaluate every N rounds (and in the last one); 0: never")
    metric: str = Field(
        AUTO,
        description="the metric that decides: accuracy, balanced_accuracy, auc, f1, log_loss, loss, rmse, mae, r2, "
        "exact_match, or module:function of (outputs, targets); auto is accuracy for classes, rmse for numbers, f1 for "
        "several labels",
    )
    metrics: dict[str, str] | None = Field(
        None,
        description="metrics of yours that are recorded beside that one, by name: missed=module:function of (outputs, "
        "targets), with commas between several; metric may name one of them",
    )
    patience: int | None = Field(
        None,
        ge=1,
        le=MOST,
        description="stop after N evaluated rounds without a better validation metric; the result is then that of the "
        "best round on validation data, unless choose says otherwise",
    )

    @model_validator(mode="before")
    @classmethod
    def _chosen_by_patience(cls, given: Any) -> Any:
        patient = isinstance(given, Mapping) and given.get("patience") is not None
        return {"choose": "best-validation", **given} if patient else given

    @field_validator("clients", mode="before")
    @classmethod
    def _clients(cls, value: Any) -> Any:
        if value not in ("all", "participants", "new") and not (str(value).isdecimal() and 1 <= int(value) <= MOST):
            raise ValueError("all, participants, new, or a number of clients")
        return value if isinstance(value, str) and not value.isdecimal() else int(value)

    @property
    def of_the_same(self) -> bool:
        """True if the same training clients are measured in every round, whether they were called or not."""
        return self.clients not in ("participants", "new")

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics(cls, value: Any) -> Any:
        return named_metrics(value)

    def in_words(self, metric: Metric = ACCURACY) -> str:
        """Say what the numbers of a table mean, to stand below it."""
        model = {"personal": "personal models", "global": "the global model", "local": "models after local work"}
        tuned = f", fine-tuned for {self.fine_tune} epochs" if self.fine_tune else ""
        known = {"all": "all clients", "participants": "each round's participants", "new": "new clients"}
        whom = known.get(str(self.clients), f"{self.clients} clients drawn at random")
        mean = {"client": "over clients", "sample": "over test samples"}
        when = {
            "last": "last round",
            "best-validation": "best round on validation data",
            "best-test": "best round on test data",
            "last-5": "mean of the last five evaluated rounds",
            "last-10": "mean of the last ten evaluated rounds",
        }
        what = f"{model[self.model]}{tuned}, {whom}"
        unit = " in %" if metric.percent else ""
        lower = "" if metric.higher_is_better else " (lower is better)"
        return f"Test {metric.title}{unit}{lower} of {what}, mean {mean[self.average]}, {when[self.choose]}."


# The names that settings of the evaluation have beside the others: on the command line, in Python and in files.
EVALUATION_NAMES = {
    **{f"evaluate_{name}": name for name in Evaluation.model_fields},
    **{name: name for name in ("fine_tune", "choose", "metric", "metrics", "patience")},
}


class Experiment(_Strict):
    """A complete experiment."""

    method: str = Field("fedavg", description="a method's name, or module:Class")
    parameters: dict[str, Any] = Field(default_factory=dict, description="the method's own hyper-parameters")

    data: str = Field(
        "digits", description="a data set's name, the path of your own (npz, table, folder), or module:function"
    )
    data_dir: str | None = Field(None, description="where data sets lie [FEDTAILOR_DATA, else ./data]")
    label_column: str | None = Field(None, description="the label column of a table [label, y, class or target]")
    client_column: str | None = Field(None, description="the client column of a table [client]")
    group: str | None = Field(
        None, description="a column of a table: samples with the same value (one patient's) stay together in a split"
    )
    split_column: str | None = Field(None, description="a column of a table that says train, validation or test")
    columns: str | None = Field(
        None,
        description="columns of a table by what they are, as in 'age=number, ward=category, id=ignore' [found out]",
    )
    drop_unlabelled: bool = Field(False, description="leave out the lines of a table that have no label")
    preprocessing: Literal["federated", "per-client", "none"] = Field(
        "federated",
        description="how the numbers of a table are standardised: by the mean and the deviation that all clients agree "
        "on, by each client's own, or not at all",
    )
    rare: int = Field(
        1,
        ge=1,
        le=MOST,
        description="what fewer of a client's training samples have is not declared: values of a category, and columns",
    )
    separator: str | None = Field(None, description="the separator of a CSV file: a character, or tab [found out]")
    decimal: str | None = Field(None, description="the decimal mark of a CSV file, . or , [found out]")
    encoding: str | None = Field(None, description="the encoding of a CSV file [found out]")
    image_size: int | None = Field(None, ge=1, le=MOST, description="resize the images of a folder to this square")
    pixels: Literal["unit", "signed"] = Field("unit", description="pixels in [0, 1] or in [-1, 1]")
    labels: Literal["shared", "own"] = Field(
        "shared", description="one set of classes for all, or each client's own, numbered from 0"
    )
    clients: int | None = Field(None, ge=1, le=MOST, description="number of clients [20, or as many as the data names]")
    partition: str | None = Field(
        None,
        description="how clients share the samples, and how their features shift (iid+rotate:0,90,180,270); or your "
        "own, a CSV file (sample,client) or module:function [dirichlet:0.3, or natural where the data names clients]",
    )
    split: Literal["merge", "official", "hash"] | None = Field(
        None,
        description="merge: ignore the split that comes with the data and split each client's samples; official: keep "
        "it; hash: by each sample's content alone, not stratified, so that new samples move no others [official if the "
        "split is your own, else merge]",
    )
    stratify: bool = Field(
        True, description="split each class of a client in proportion [on; --no-stratify: at random]"
    )
    test: float = Field(0.2, ge=0, lt=1, description="share of a client's samples for testing")
    validation: float = Field(0.1, ge=0, lt=1, description="share of a client's samples for validation")
    min_samples: int = Field(10, ge=1, le=MOST, description="at least N samples per client in a random partition")
    max_train: int | None = Field(
        None, ge=1, le=MOST, description="at most N training samples per client, and validation samples in proportion"
    )
    new_clients: int = Field(0, ge=0, le=MOST, description="clients held out from training")

    model: str = Field(
        "mlp",
        description="a network's name, or module:Class, called with (input shape, classes), or by names of arguments "
        "like in_channels and num_classes, or with nothing",
    )
    head: int | str = Field(
        1, description="the head: its number of layers, the last that data pass through, or their names"
    )
    weights: str | None = Field(
        None, description="pretrained weights: a safetensors file with the network's names; the head may differ"
    )
    frozen: str | None = Field(
        None, description="parts that are not trained and never sent: names of submodules, or body (all but the head)"
    )
    lora: int | str | None = Field(
        None,
        description="train adapters of this rank in place of the body's linear layers (LoRA): 8, or "
        "8,alpha=16,layers=encoder",
    )
    loss: str = Field(
        "cross-entropy",
        description="cross-entropy, mse, bce (several labels of 0 or 1), or module:function of (outputs, targets)",
    )

    rounds: int = Field(20, ge=1, le=MOST, description="communication rounds")
    participation: str = Field(
        "all",
        description="who takes part in a round: all, 0.25 (a fraction), 6 (a number), 4-28 (a number drawn anew each "
        "round), independent:0.2 (each client with this probability)",
    )
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="optimiser of local training")
    lr: float = Field(
        0.1, gt=0, description=f"learning rate of local training; {ADAM_LR} with adam and adamw unless given"
    )
    schedule: RateSchedule = Field(
        "constant",
        description="factor of the learning rate over rounds: constant, step:10,0.5 (half every 10 rounds), cosine, "
        "cosine:0.1 (to a tenth), warmup:5,cosine, or a formula of the round t like 1.0 / sqrt(t)",
    )
    step_schedule: RateSchedule = Field(
        "constant", description="factor of the learning rate over the steps of each local descent, written likewise"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    keep_momentum: bool = Field(
        False, description="keep a client's momentum, or the moments of adam, from round to round"
    )
    weight_decay: float = Field(
        0.0, ge=0, description="weight decay of local training: added to the gradient, with adamw to the step"
    )
    clip: float | None = Field(None, gt=0, description="clip the gradient of each step to this norm")
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each target that training spreads over all classes"
    )
    class_weights: str = Field(
        "none",
        description="weights of the classes in the training loss: none, balanced (rare classes count more), or one "
        "number a class, 0.2,0.8",
    )
    epochs: int = Field(5, ge=1, le=MOST, description="local epochs in a round")
    steps: int | None = Field(None, ge=1, le=MOST, description="local steps in a round, in place of epochs")
    batch: int | Literal["full"] = Field(10, description="batch size, or full")
    drop_last: bool = Field(False, description="leave out an epoch's incomplete batch")
    privacy: str | None = Field(
        None,
        description="privacy: client, clip=1.0, noise=0.8, delta=1e-5 (a client's change is clipped, noise "
        "is added to the mean; by=clients: by each of them; clip=quantile:0.5 follows the median) or sample, clip=1.0, "
        "noise=0.8 (DP-SGD at each client); without noise, it is found for --epsilon",
    )
    epsilon: float | Literal["inf"] | None = Field(
        None,
        description="the privacy budget: stop before ε exceeds it or, where the noise is not given, find the noise for "
        "this number of rounds; inf is the same run without privacy",
    )
    aggregation: str = Field(
        "mean",
        description="how means of uploads are taken: mean (mean:inf: without its guard), median, trimmed:0.2, krum:2, "
        "multi-krum:2,5, geometric-median or norm-bound:1.0",
    )
    fairness: str = Field(
        "none",
        description="weights of means that grow with the clients' losses: q:1.0 (by losses to this power, after "
        "q-FFL), afl:0.1 (by a mixture that climbs along the losses with this step), or none",
    )
    secure: bool = Field(
        False,
        description="secure aggregation: uploads leave masked, and the server learns their sum alone (at real sites, "
        "or between sites in memory)",
    )
    system: str | None = Field(
        None,
        description="uneven clients, in virtual seconds: speeds=lognormal:0.5:1000 (samples a second: spread and "
        "median), bandwidth=1e6 (bytes a second), stragglers=0.1:10 (a tenth is ten times slower), "
        "availability=0.5:3600 (there half of every hour), or a CSV file with a line for each client",
    )
    late: str | None = Field(
        None,
        description="whom a round waits for, where not for everybody: deadline=30 (virtual seconds; with partial, slow "
        "clients take fewer steps), first=10 (the first ten replies), or buffer=5 (asynchronous: the server moves "
        "after five replies, and whoever is late goes on; staleness=0.5 weighs old changes down)",
    )
    server_optimizer: Literal["sgd", "momentum", "nesterov", "adagrad", "yogi", "adam"] = Field(
        "sgd",
        description="the server's optimiser: its steps along the clients' mean change (FedAvgM, FedAdagrad, FedYogi, "
        "FedAdam); sgd at a rate of 1 takes the mean itself",
    )
    server_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of the server's optimiser [1; 0.03 with adagrad, yogi and adam]",
    )
    attack: str | None = Field(
        None,
        description="hostile clients, for studies: sign-flip, scaling, gaussian, label-flip, little, min-max, "
        "inner-product, backdoor, nan, wrong-shape, wrong-name or replay, clients=0.2 (their share, or their numbers), "
        "factor=10",
    )
    augment: str | None = Field(
        None,
        description="change training images at random: crop:4,flip,jitter:0.2 or any of these (a window of the image "
        "padded by 4 pixels; mirrored left to right; brightness and contrast up to 20 % up or down)",
    )
    seed: int = Field(0, ge=0, le=2**64 - 1, description="seed of everything random")
    dtype: Literal["float32", "float64"] = Field("float32", description="precision of all computation")
    autocast: bool = Field(False, description="compute passes through the network in bfloat16, where the device can")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest",
        description="products in float32 may round their factors, where the device can: to TF32 (high) or bfloat16 "
        "(medium)",
    )
    device: str = Field("cpu", description="cpu, cuda, mps or auto; cuda:0,1 for a worker on each")
    stack: Annotated[int, Field(ge=1, le=MOST)] | Literal["auto"] | None = Field(
        None,
        description="clients that train as one computation, or auto: as many as are faster [1 on the CPU, auto on "
        "accelerators]",
    )

    evaluation: Evaluation = Evaluation()

    on_failure: Literal["skip", "stop"] = Field(
        "skip", description="leave a client that fails out of the round, or stop the run"
    )
    engine: Literal["auto", "in-process", "processes", "ray", "sites-in-memory"] = Field(
        "auto",
        description="where clients run: in-process, in worker processes, in a Ray cluster (ray), or as "
        "sites-in-memory: apart from each other and from the server, with letters between as across a network",
    )
    address: str | None = Field(
        None, description="host:port of a Ray cluster's head [--engine ray starts Ray on this machine]"
    )
    workers: int | None = Field(
        None, ge=1, le=1000, description="worker processes [as many as cores, or as the cluster has CPUs]"
    )
    deadline: float | None = Field(
        None, gt=0, description="seconds that a client may take for its work in a round before it counts as failed"
    )
    states: Literal["memory", "disk"] = Field("memory", description="where the clients' states are kept during the run")
    observe_every: int = Field(1, ge=1, le=MOST, description="record the method's diagnostics every N rounds")
    observe_limit: float = Field(64.0, ge=0, description="MB that the recorded diagnostics may take altogether")
    debug: bool = Field(False, description="run in process, and stop at a method's first exception with its traceback")
    checkpoint_every: int = Field(10, ge=1, le=MOST, description="write a checkpoint every N rounds")
    track: str | None = Field(
        None,
        description="trackers that get settings, metrics and files too: mlflow, wandb, tensorboard, module:Class, or "
        "several with commas",
    )

    @model_validator(mode="after")
    def _apart(self) -> Self:
        other = "--debug" if self.debug else f"--engine {self.engine}"
        if self.secure and (self.debug or self.engine not in ("auto", "sites-in-memory")):
            raise FedtailorError(
                f"Secure aggregation is between sites that are apart: take --engine sites-in-memory, and leave {other} "
                "out."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _older(cls, settings: Any) -> Any:
        """Read files of the time when TensorBoard was the only tracker."""
        if not isinstance(settings, Mapping) or not isinstance(settings.get("tensorboard"), bool):
            return settings
        rest = {name: value for name, value in settings.items() if name != "tensorboard"}
        return {"track": "tensorboard", **rest} if settings["tensorboard"] else rest

    @model_validator(mode="before")
    @classmethod
    def _default_lr(cls, settings: Any) -> Any:
        kind = settings.get("optimizer") if isinstance(settings, Mapping) else None
        adam = isinstance(kind, str) and kind in ("adam", "adamw")
        return {**settings, "lr": ADAM_LR} if adam and "lr" not in settings else settings

    @field_validator("class_weights", mode="before")
    @classmethod
    def _class_weights(cls, value: Any) -> str:
        try:
            listed = isinstance(value, list | tuple)
            text = ",".join(str(float(weight)) for weight in value) if listed else value.strip()
            if text not in ("none", "balanced"):
                weights = [float(weight) for weight in text.split(",")]
                if not (all(isfinite(weight) and weight >= 0 for weight in weights) and any(weights)):
                    raise ValueError
            return text
        except (AttributeError, TypeError, ValueError, OverflowError):
            raise ValueError("none, balanced, or one number of at least 0 for each class, like 0.2,0.8") from None

    @field_validator("track", mode="before")
    @classmethod
    def _track(cls, value: Any) -> Any:
        listed = isinstance(value, list) and all(isinstance(name, str) for name in value)
        text = ",".join(value) if listed else value
        return None if text == NONE else text

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            return value
        parts = [f"{name}={kind}" for name, kind in value.items()]
        return ", ".join(f'"{part}"' if "," in part else part for part in parts)

    @field_validator("participation", mode="before")
    @classmethod
    def _participation(cls, value: Any) -> str:
        try:
            return str(Participation.parse(value))
        except OverflowError:
            raise ValueError(f"at most {MOST} clients") from None

    @field_validator("privacy", mode="before")
    @classmethod
    def _privacy(cls, value: Any) -> str | None:
        return None if value in (None, NONE) else str(Privacy.parse(value))

    @field_validator("attack", mode="before")
    @classmethod
    def _attack(cls, value: Any) -> str | None:
        return None if value in (None, NONE) else str(Attack.parse(value))

    @field_validator("aggregation", mode="before")
    @classmethod
    def _aggregation(cls, value: Any) -> str:
        return str(Rule.parse(value))

    @field_validator("system", mode="before")
    @classmethod
    def _system(cls, value: Any) -> str | None:
        if value in (None, NONE):
            return None
        text = str(value) if isinstance(value, Path) else value
        return text if isinstance(text, str) and names_file(text) else str(System.parse(text))

    @field_validator("late", mode="before")
    @classmethod
    def _late(cls, value: Any) -> str | None:
        return None if value in (None, NONE) else str(Late.parse(value))

    @field_validator("fairness", mode="before")
    @classmethod
    def _fairness(cls, value: Any) -> str:
        return str(Fairness.parse(value))

    @field_validator("epsilon", mode="before")
    @classmethod
    def _epsilon(cls, value: Any) -> Any:
        if value is None or value == "inf":
            return value
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError("a number above 0, or inf") from None
        if not number > 0:
            raise ValueError("a number above 0, or inf")
        return "inf" if number == float("inf") else number

    @field_validator("head", mode="before")
    @classmethod
    def _head(cls, value: Any) -> Any:
        value = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError("a number of layers, or their names")
        return value

    @field_validator("lora", mode="before")
    @classmethod
    def _lora(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 10 else value

    @field_validator("weights", "partition", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("batch", mode="before")
    @classmethod
    def _batch(cls, value: Any) -> Any:
        if value != "full" and not (str(value).isdecimal() and 1 <= int(value) <= MOST):
            raise ValueError("a whole number of at least 1, or full")
        return value if value == "full" else int(value)


SETTING_NAMES = (*Experiment.model_fields, *EVALUATION_NAMES)
