"""The card of a model: the page that Hugging Face's hub shows of a folder with a model."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedtailor.model_files.format import Description


def card(about: "Description") -> str:
    """Write the page, with the metadata that the hub reads above it. They are YAML, as all JSON is."""
    whose = "" if about.client is None else f" of client {about.name}"
    title, task = f"{about.method}: the {about.kind} model{whose}", _task(about)
    facts: dict[str, object] = {
        "library_name": "fedtailor",
        "tags": ["federated-learning", "personalized-federated-learning", about.method],
    }
    quality = about.measured
    if task:
        facts["pipeline_tag"] = task
    if about.metric and about.value is not None:
        quality = f"{about.metric.shown(about.value)} {quality}"
        metrics = [{"type": about.metric.name, "value": about.value}]
        dataset = {"type": about.data, "name": about.data}
        results = [{"task": {"type": task or "other"}, "dataset": dataset, "metrics": metrics}]
        facts["model-index"] = [{"name": title, "results": results}]
    maker = f"[fedtailor](https://github.com/fedtailor/fedtailor) {about.fedtailor}"
    lines = [
        "---",
        *(f"{name}: {json.dumps(fact)}" for name, fact in facts.items()),
        "---",
        f"\n# {title}\n",
        f"Trained on `{about.data}` by {maker}; {about.round} of {about.rounds} rounds.",
        f"{about.test_samples} test samples: {quality}.\n",
        "```python",
        *about.load,
        "```\n",
        f"{about.preprocessing} `config.json` says the rest.\n",
    ]
    return "\n".join(lines)


def _task(about: "Description") -> str:
    """Name the task as the hub does; nothing if it has no name for it."""
    kind = "classification" if about.classes else "regression"
    if about.table is not None:
        return f"tabular-{kind}"
    return "image-classification" if len(about.input_shape) == 3 and about.classes else ""
