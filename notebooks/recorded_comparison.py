# %% [markdown]
# # A comparison of your own tensors that survives `kill -9`
#
# The desk of somebody who writes a paper: data are tensors, the network is a class of one's own, the comparison takes
# a night, and in the night the machine goes down. With `out=` a comparison keeps the data and everything that it has
# computed. The same call goes on, to the same bits. MLflow sees all of it.
#
# What is compared stands in a file, `study.py`: then another process finds it by import, and so does the command line.

# %%
import os
import subprocess
import sys
from pathlib import Path

Path("study.py").write_text('''
import torch
from torch import nn

import fedtailor as ft


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).relu())


def missed_sevens(outputs, targets):
    """The share of all samples that are a seven and taken for something else."""
    return ((targets == 7) & (outputs.argmax(1) != 7)).float().mean()


def clients():
    """Ten clients as a dictionary of tensors: each has the digits k, k+1 and k+2, and writes darker than the last."""
    digits, generator = ft.load_data("digits"), torch.Generator().manual_seed(0)
    order = torch.randperm(len(digits), generator=generator)
    x, y = digits.x[order], digits.y[order]
    found = {}
    for k in range(10):
        mine = torch.isin(y, torch.tensor([k, (k + 1) % 10, (k + 2) % 10])).nonzero().flatten()[k::6]
        found[f"writer {k}"] = ((0.5 + k / 20) * x[mine], y[mine])
    return found


def tell(title, record):
    print(f"{title}: round {record.round}", flush=True)


def compare(out="cmp", track="mlflow", on_round=tell, **changes):
    asked = {"data": clients(), "model": Net, "metrics": {"missed_sevens": missed_sevens}, "seeds": [0, 1]}
    asked |= {"rounds": 6, "epochs": 5, "lr": 0.2, "engine": "in-process"}
    return ft.compare(["local", "fedavg", "ditto"], **{**asked, **changes}, out=out, track=track, on_round=on_round)
''')
os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{Path.cwd()}/mlflow.db"  # one file, for all processes
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

# %% [markdown]
# A process begins the comparison. While Ditto trains with the first seed, it is killed: `SIGKILL`, which no program can
# catch.

# %%
process = subprocess.Popen(
    [sys.executable, "-c", "import study; study.compare()"],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
)
for line in process.stdout:
    print(line, end="")
    if line.startswith("ditto, seed 0: round 3"):
        process.kill()
        break
process.stdout.close()
print("exit code", process.wait())

# %% [markdown]
# What is there: the question, the data as a file whose name is their checksum, and the runs that were begun.

# %%
for path in sorted(Path("cmp").glob("*")) + sorted(Path("cmp/runs").glob("*")):
    print(path)


def command(*words):
    """Return the lines that a command of fedtailor prints."""
    done = subprocess.run([sys.executable, "-m", "fedtailor", *words], capture_output=True, text=True)
    return done.stdout.splitlines()


print(*command("show", "cmp")[-5:], sep="\n")

# %% [markdown]
# The same call goes on, here in another process: in the notebook. Finished runs stay as they are. Ditto's goes on after
# its last checkpoint, so that at most one round is done again.

# %%
sys.path.insert(0, "")  # where a notebook looks for modules already
import study

table = study.compare()

# %%
print(table)

# %% [markdown]
# An uninterrupted comparison has the same bits: all models, all states of clients.

# %%
whole = study.compare(out="whole", track=None, on_round=None)


def checkpoints(out):
    return {path.relative_to(out): path.read_bytes() for path in Path(out).glob("runs/*/checkpoint/**/*.safetensors")}


assert checkpoints("cmp") == checkpoints("whole")
assert [line.value for line in table.lines] == [line.value for line in whole.lines]
print(len(checkpoints("cmp")), "files of checkpoints, all the same")

# %% [markdown]
# Other data, or a network that begins with other numbers, are another comparison: they are refused by name, before
# anything is computed.

# %%
import fedtailor as ft

changed = study.clients()
changed["writer 3"][0][0, 0, 4, 4] += 0.01  # one pixel
try:
    study.compare(data=changed)
except ft.FedtailorError as error:
    print(error)

text = Path("study.py").read_text()
Path("study.py").write_text(text.replace("32", "24"))  # a smaller network of the same name
refused = subprocess.run([sys.executable, "-c", "import study; study.compare()"], capture_output=True, text=True)
print(refused.stderr.splitlines()[-1])
Path("study.py").write_text(text)

# %% [markdown]
# Everything in this comparison has a name: the data are a file beside the runs, network and metric are found in
# `study.py`. So the command line goes on with it, too, and here adds a third seed. It ends with what came out. (Were
# the network a lambda, or a class of this notebook, the first line of `comparison.toml` would say that only the
# notebook can go on.)

# %%
print(*command("compare", "cmp/comparison.toml", "--seeds", "0,1,2", "--out", "cmp")[-2:], sep="\n")

# %% [markdown]
# The page with the table, all figures and every client, made of the table itself; and the same figures for a notebook.

# %%
table = study.compare(seeds=[0, 1, 2], on_round=None)  # nothing is left to do
page = ft.report(table, to="report.html")
print(page.name, f"{page.stat().st_size / 1e6:.1f} MB")

figures = table.figures()
print(*figures)
figures["curves-rounds"].write_html("curves.html")  # in a notebook, `figures["curves-rounds"]` alone shows it

# %% [markdown]
# MLflow has the comparison as one run, with all tables and the page as artifacts, and inside of it a run for each
# method and seed. The one that was killed went on under its id, and each of its rounds is there once.

# %%
from mlflow import MlflowClient

client = MlflowClient()
(experiment,) = client.search_experiments(filter_string="name = 'fedtailor'")
tracked = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
(whole,) = (run for run in tracked if "mlflow.parentRunId" not in run.data.tags)
print(whole.info.run_name, whole.info.status, [file.path for file in client.list_artifacts(whole.info.run_id)])
for run in tracked:
    if run.data.tags.get("mlflow.parentRunId") == whole.info.run_id:
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "accuracy")]
        assert steps == [1, 2, 3, 4, 5, 6]
        last = {name: f"{100 * run.data.metrics[name]:.1f} %" for name in ("accuracy", "missed_sevens")}
        print(run.info.run_name.rpartition("-")[0], run.info.status, f"{len(steps)} rounds", last)
