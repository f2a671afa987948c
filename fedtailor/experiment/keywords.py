"""The settings as keyword arguments, for editors and type checkers: `fedtailor.run("fedavg", lr=0.1)`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedtailor.experiment.settings import Evaluation


class EvaluationSettings(TypedDict, total=False):
    """The settings of an evaluation as a dictionary (see `Evaluation`)."""

    model: Literal["personal", "global", "local"]
    fine_tune: int
    clients: Literal["all", "participants", "new"] | int
    average: Literal["client", "sample"]
    choose: Literal["last", "best-validation", "best-test", "last-5", "last-10"]
    train: bool
    every: int
    metric: str
    metrics: dict[str, str] | None
    patience: int | None


class Settings(TypedDict, total=False):
    """The settings of an experiment as keyword arguments: those of `Experiment` that are not objects."""

    parameters: dict[str, Any]
    data_dir: str | None
    label_column: str | None
    client_column: str | None
    group: str | None
    split_column: str | None
    columns: str | Mapping[str, str] | None
    drop_unlabelled: bool
    preprocessing: Literal["federated", "per-client", "none"]
    rare: int
    separator: str | None
    decimal: str | None
    encoding: str | None
    image_size: int | None
    pixels: Literal["unit", "signed"]
    labels: Literal["shared", "own"]
    clients: int | None
    partition: str | Path | Callable[..., Any] | None
    split: Literal["merge", "official", "hash"] | None
    stratify: bool
    test: float
    validation: float
    min_samples: int
    max_train: int | None
    new_clients: int
    head: int | str
    weights: str | None
    frozen: str | None
    lora: int | str | None
    rounds: int
    participation: str | int | float
    optimizer: Literal["sgd", "adam", "adamw"]
    lr: float
    schedule: str
    step_schedule: str
    momentum: float
    keep_momentum: bool
    weight_decay: float
    clip: float | None
    label_smoothing: float
    class_weights: str | Sequence[float]
    epochs: int
    steps: int | None
    batch: int | Literal["full"]
    drop_last: bool
    privacy: str | Mapping[str, Any] | None
    epsilon: float | Literal["inf"] | None
    aggregation: str
    fairness: str
    secure: bool
    system: str | Mapping[str, Any] | Path | None
    late: str | Mapping[str, Any] | None
    server_optimizer: Literal["sgd", "momentum", "nesterov", "adagrad", "yogi", "adam"]
    server_lr: float | None
    attack: str | Mapping[str, Any] | None
    augment: str | None
    seed: int
    dtype: Literal["float32", "float64"]
    autocast: bool
    matmul_precision: Literal["highest", "high", "medium"]
    device: str
    stack: int | Literal["auto"] | None
    evaluation: Evaluation | EvaluationSettings
    evaluate_model: Literal["personal", "global", "local"]
    evaluate_fine_tune: int
    evaluate_clients: Literal["all", "participants", "new"] | int
    evaluate_average: Literal["client", "sample"]
    evaluate_choose: Literal["last", "best-validation", "best-test", "last-5", "last-10"]
    evaluate_train: bool
    evaluate_every: int
    evaluate_metric: str
    evaluate_metrics: dict[str, str] | None
    evaluate_patience: int | None
    fine_tune: int
    choose: Literal["last", "best-validation", "best-test", "last-5", "last-10"]
    metrics: Mapping[str, str | Callable[..., Any]] | str | None
    patience: int | None
    on_failure: Literal["skip", "stop"]
    engine: Literal["auto", "in-process", "processes", "ray", "sites-in-memory"]
    address: str | None
    workers: int | None
    deadline: float | None
    states: Literal["memory", "disk"]
    observe_every: int
    observe_limit: float
    debug: bool
    checkpoint_every: int
