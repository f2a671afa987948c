# %% [markdown]
# # First steps: one run, and all that is in its result
#
# A federation in Python: clients, a run, its numbers, its models. Comparing methods is the subject of the [next
# notebook](comparing.ipynb); the [tutorial](../docs/tutorial.md) shows the same on the command line.

# %%
import fedtailor as ft

data = ft.load_data("digits")
print(f"{len(data.y)} images of {'×'.join(map(str, data.x.shape[1:]))}, classes {', '.join(data.classes)}")

# %% [markdown]
# Ten clients, each with mostly a few of the digits: `dirichlet:0.3` draws each digit's shares from a Dirichlet
# distribution. A row is a client, a column a digit.

# %%
clients = ft.federate(data, partition="dirichlet:0.3", clients=10, seed=0)
print(clients.counts())

# %% [markdown]
# Ditto: a global model is averaged as in FedAvg, and each client trains a personal one that is held near it. The
# personal model never leaves the client. What you do not set has a default; `help(ft.run)` and `fedtailor run --help`
# list them. A run is never overwritten: to run this notebook again, remove the directory `runs`.

# %%
settings = {"data": "digits", "clients": 10, "partition": "dirichlet:0.3", "rounds": 10, "seed": 0}
result = ft.run("ditto", **settings, lam=0.5, out="runs/first")
print(f"{100 * result.accuracy:.2f} %: mean over clients of the personal models' test accuracy, last round")

# %% [markdown]
# A mean hides much. Each client has numbers of its own, and with 15 to 52 test images they are uncertain: one image
# is 2 to 7 points.

# %%
for number, metrics in result.per_client.items():
    print(f"client {number}: {100 * metrics.accuracy:6.2f} % of {metrics.n_samples} test images")

# %% [markdown]
# Round by round, as a pandas table. `up` are the bytes that all clients sent: 10 clients with 15,010 numbers of 4
# bytes.

# %%
rounds = result.to_pandas()[["accuracy", "worst_decile", "loss", "bytes_up"]]
print(rounds.tail(3))

# %% [markdown]
# A client's model is a state dict for plain PyTorch. Client 2's, on its own test images:

# %%
from torch import nn

network = nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10)).eval()
network.load_state_dict(result.personal(2))
x, y = clients.test(2)
right = (network(x).argmax(1) == y).float().mean().item()
print(f"{100 * right:.2f} %")
assert right == result.per_client[2].accuracy

# %% [markdown]
# The run is in its directory. Another process loads it, or makes it longer: the numbers are those of a run that was
# asked for so many rounds at once. `resume` also goes on after a crash.

# %%
longer = ft.resume("runs/first", rounds=15)
assert [record.accuracy for record in longer.rounds[:10]] == [record.accuracy for record in result.rounds]
print(f"round {longer.rounds[-1].round}: {100 * ft.load('runs/first').accuracy:.2f} %")

# %% [markdown]
# A file for each client, with a description of how to use it; then predictions with one of them.

# %%
files = ft.export(longer, to="models", overwrite=True)
found = ft.predict(files[2], x[:5])
print(found.predicted, found.probabilities.max(1).values)
