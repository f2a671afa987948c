# %% [markdown]
# # A federation of sites
#
# In a simulation all clients' data lie on one machine. In a federation of sites they lie where they were made, and
# nothing passes but letters. This notebook shows the letters in memory, then what one site sees before it joins, and
# how the real thing is started.
#
# Four hospitals have patients with and without heart disease. **The patients are invented**: five columns, drawn at
# random.

# %%
from pathlib import Path

import numpy as np
import pandas as pd

import fedtailor as ft

draw = np.random.default_rng(0)


def patients(count, age, threshold):
    """Draw patients; a hospital has its own ages, and its own threshold for the diagnosis."""
    table = pd.DataFrame(
        {
            "age": draw.normal(age, 9, count).round(),
            "sex": draw.choice(["female", "male"], count),
            "max_heart_rate": draw.normal(210 - age, 20, count).round(),
            "thal": draw.choice(["normal", "fixed", "reversible"], count, p=[0.6, 0.1, 0.3]),
        }
    )
    score = table["age"] / 9 - table["max_heart_rate"] / 20 + 2 * (table["thal"] != "normal")
    table["diagnosis"] = np.where(score + draw.logistic(0, 1, count) > threshold, "yes", "no")
    return table.mask((draw.random(table.shape) < 0.1) & (table.columns == "thal"))  # empty cells


hospitals = {"harbour": (300, 54, -1), "hill": (290, 48, -2), "lake": (120, 57, -1), "valley": (200, 61, 0)}
tables = {name: patients(*about) for name, about in hospitals.items()}
pd.concat([table.assign(hospital=name) for name, table in tables.items()]).to_csv("all.csv", index=False)
print(tables["lake"].head(3))

# %% [markdown]
# First a simulation, to have something to compare with.

# %%
table = {"data": "all.csv", "label_column": "diagnosis", "client_column": "hospital"}
training = {"model": "mlp:16", "preprocessing": "per-client", "rounds": 10, "epochs": 1, "lr": 0.05}
simulated = ft.run("ditto", **table, **training)
print(f"{100 * simulated.accuracy:.2f} %")

# %% [markdown]
# `engine="sites-in-memory"` makes every client a site of its own, with its own samples and its own network. Between
# it and the server are letters: bytes that are written, read and checked as across a network. Nothing else is
# changed, so the numbers are the same to the last bit.

# %%
apart = ft.run("ditto", **table, **training, engine="sites-in-memory")
assert [record.accuracy for record in apart.rounds] == [record.accuracy for record in simulated.rounds]
assert all((apart.personal(0)[name] == value).all() for name, value in simulated.personal(0).items())
print(f"{100 * apart.accuracy:.2f} %, {apart.rounds[-1].bytes_up / 4:,.0f} bytes up for each site and round")

# %% [markdown]
# Now the real thing, from the side of one hospital. The coordinator has written a **plan**: who takes part, which
# columns count, what is learned, and what sites tell at most.

# %%
PLAN = """\
name = "heart"
server = "fl.example.org"
port = 8002
admin = "coordinator@example.org"
sites = ["harbour", "hill", "lake", "valley"]
classes = ["no", "yes"]

[features]
age = "number"
sex = ["female", "male"]
max_heart_rate = "number"
thal = "category"

[privacy]
metrics = "rounded"
rare = 5

[experiment]
method = "ditto"
model = "mlp:16"
preprocessing = "per-client"
rounds = 10
epochs = 1
lr = 0.05
"""
SITE = """\
name = "lake"
data = "patients.csv"
label_column = "diagnosis"
"""
lake = Path("lake")
lake.mkdir(exist_ok=True)
tables["lake"].to_csv(lake / "patients.csv", index=False)
(lake / "federation.toml").write_text(PLAN)
(lake / "site.toml").write_text(SITE)
print(SITE)

# %% [markdown]
# **Before anything is sent**, the hospital's engineer looks at what would leave. `fedtailor site check site.toml`
# reads the data, plays all rounds of the plan in memory, and prints every declared fact and every tensor. In a
# terminal it is one command; here Python calls it.

# %%
import subprocess
import sys


def fedtailor(*words):
    done = subprocess.run([sys.executable, "-m", "fedtailor", *words], capture_output=True, text=True, encoding="utf-8")
    return done.stdout + done.stderr


print(fedtailor("site", "check", str(lake / "site.toml")))

# %% [markdown]
# What does not fit the plan is found here, too, and one sentence says what to do: a column that the table does not
# have, say.

# %%
(lake / "federation.toml").write_text(PLAN.replace("max_heart_rate", "heart_rate"))
print(fedtailor("site", "check", str(lake / "site.toml")))

# %% [markdown]
# **Then keys are exchanged, and the run is started.** Each site makes its own key and lets the coordinator sign it;
# all connect to one port of the server, over mutual TLS. These are commands for several machines:
#
# ```
# fedtailor deploy plan federation.toml --out kits    # coordinator: a directory for each role
# fedtailor site request site.toml                    # site: a key, and a request to sign it
# fedtailor deploy approve kits lake.request.zip      # coordinator
# fedtailor site install site.toml lake.answer.zip    # site
# fedtailor site start site.toml                      # site: take part; its model file is written here at the end
# fedtailor deploy run federation.toml                # coordinator: the rounds
# ```
#
# [Real sites](../docs/sites.md) walks through it with what everybody sees, and `make hospitals` does all of it on one
# machine. [Who is trusted with what](../docs/threat-model.md) says what is protected, and what is not.
