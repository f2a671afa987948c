# %% [markdown]
# # Writing a method: thirty lines, proven, compared
#
# An idea: a client mixes the global model with its own, and finds out by its validation samples how much of each.
# With little data of its own it will trust the others, with unusual data itself.
#
# `uploads` says what leaves a client: its model, of which the server sees the mean by samples alone, and the share of
# its own model, a single number for the record. What is in `client.state` never leaves. A hyper-parameter is a typed
# field.

# %%
from pydantic import Field

import fedtailor as ft


class Weighed(ft.Method):
    """FedAvg, and a personal model between the global one and the client's own, by its validation loss."""

    uploads = {"theta": ft.Mean("samples"), "share": ft.Each(record=True)}
    levels: int = Field(4, ge=1, description="the share of the own model is one of 0, 1/levels, …, 1")

    def start(self, server):
        super().start(server)  # theta: the network's initial vector
        server.state["share"] = server.initial.new_zeros(server.n_clients)

    def train(self, client, message):
        shared = message["theta"]
        own = client.descend(shared)  # the experiment's epochs, batches and learning rate
        shares = [own.new_tensor(level / self.levels) for level in range(self.levels + 1)]
        if len(client.validation_data[1]):
            share = min(shares, key=lambda a: client.loss(a * own + (1 - a) * shared, client.validation_data))
        else:
            share = shares[0]
        client.state |= {"own": own, "share": share}
        return {"theta": own, "share": share}

    def upload_like(self, server, client):
        return {"share": server.state["share"][client]}

    def receive(self, server, total):
        super().receive(server, total)  # theta becomes the mean
        server.note(total, "share")

    def personal_model(self, client, message):
        share, shared = client.state.get("share", 0.0), message["theta"]
        return share * client.state.get("own", shared) + (1 - share) * shared

    def observe(self, server):
        return {"share": server.state["share"]}


# %% [markdown]
# It runs, on any data and on any engine. Bytes, metrics, checkpoints and resuming come for free.

# %%
settings = {"data": "digits", "clients": 10, "partition": "dirichlet:0.3", "rounds": 8, "epochs": 2}
result = ft.run(Weighed(levels=4), **settings)
print(f"{100 * result.accuracy:.2f} %, {result.rounds[-1].bytes_up / 10:,.0f} bytes up for each client and round")
print(result.observed(8)["share"])

# %% [markdown]
# **Prove it.** The common suite is the one that every method of the catalogue passes: same bits on every engine and
# after resuming, uploads as declared, clients with one sample or one class, missing replies, clients that join later,
# and more. It takes seconds, and the first check that fails says what is wrong.

# %%
from fedtailor.testing import CHECKS, check_method

check_method(Weighed())
print(f"{len(CHECKS)} checks passed")

# %% [markdown]
# For example, a method that does not declare all that its clients upload:


# %%
class Careless(Weighed):
    """The same, but for a declaration that was forgotten."""

    uploads = {"theta": ft.Mean("samples")}


try:
    check_method(Careless())
except Exception as error:
    print(error)

# %% [markdown]
# A **limit case** is the best test of a formula. Where a client has no validation samples, its share is 0: this is
# FedAvg, to the last bit.

# %%
mine, fedavg = (ft.run(method, **settings, validation=0) for method in (Weighed(), "fedavg"))
assert mine.accuracy == fedavg.accuracy
print(f"{100 * mine.accuracy:.2f} % both")

# %% [markdown]
# **Compare it.** Classes stand beside names. The method looks at validation samples, so do not choose a round or a
# setting by them; the comparison takes the mean of the last five rounds on test samples.

# %%
print(ft.compare(["local", "fedavg", "apfl", Weighed], **settings, seeds=[0, 1]))

# %% [markdown]
# So much for the idea: it is far better than FedAvg, and worse than each client alone. The shares above say why: most
# clients take their own model whole, and that one has learned for a single round. To find this out took thirty lines.
#
# In a file `mine.py`, it is `fedtailor run mine:Weighed --set levels=10`. [Writing a
# method](../docs/writing-a-method.md) has all that a client and a server can do.
