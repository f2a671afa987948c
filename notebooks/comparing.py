# %% [markdown]
# # Comparing: which method is better, and for whom
#
# Every method gets the same clients, the same splits and the same participants in every round, with several seeds.
# The questions: is learning together better than each client alone (Local)? Are models of one's own better than one
# for all (FedAvg)? Who loses?

# %%
import fedtailor as ft

settings = {"data": "digits", "clients": 10, "partition": "dirichlet:0.3", "rounds": 8, "epochs": 3}
table = ft.compare(["local", "fedavg", "ditto", "fedper"], **settings, seeds=[0, 1], out="comparisons/digits")
print(table)

# %% [markdown]
# `vs best` is a paired test over the clients: `≈` says that this comparison shows no difference, not that there is
# none. `±` in the first column is over seeds, that of the gain over clients. The numbers of the table are fields:

# %%
for line in table.lines:
    gain = "" if line.gain is None else f", a client gains {100 * line.gain:+.2f} points over Local"
    print(f"{line.title}: {100 * line.value:.2f} %{gain}")

# %% [markdown]
# Client by client. The best method in the mean need not be the best for everybody.

# %%
clients = table.to_pandas("clients")
print(clients[["local", "fedper"]].assign(gain=clients["fedper"] - clients["local"]).round(4))

# %% [markdown]
# Two seeds are few. The same call with more seeds and the same directory keeps the runs that are there, and adds
# those that are missing.

# %%
more = ft.compare(["local", "fedavg", "ditto", "fedper"], **settings, seeds=[0, 1, 2], out="comparisons/digits")
print(more.to_pandas()[["value", "value_std", "gain", "losing", "p"]].round(4))

# %% [markdown]
# Settings are chosen on validation data, never on test data: of a method's lines, `✓` marks the one that they choose,
# and only this one is ranked. The best of many lines on test data would look better than it is. (With more settings
# to choose, see `ft.tune` in [wearables](wearables.ipynb).)

# %%
grid = ft.compare(["local", "ditto"], **settings, seeds=[0], grid={"lam": [0.05, 0.5, 2.0]})
for line in grid.lines:
    print(
        f"{line.title}: validation {100 * line.validation:.2f} %, test {100 * line.value:.2f} %",
        "✓" if line.chosen else "",
    )

# %% [markdown]
# One HTML file has the table, the learning curves and all clients; for a paper there is LaTeX.

# %%
page = ft.report("comparisons/digits", to="digits.html")
print(page)
print(more.latex()[:200], "…")
