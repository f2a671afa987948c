# %% [markdown]
# # Hospitals: from a table to a model for each
#
# Five hospitals examine breast tumours. Each has a table of its own patients: measurements of very different scale, a
# text column, empty cells, and a number for each patient. None of them may hand it out. Together they learn, and each
# ends with a model for its own patients.
#
# The measurements are real (569 tumours from Wisconsin, part of scikit-learn). Which hospital a tumour belongs to, the
# stain and the empty cells are made up here: the last hospitals get the larger tumours.

# %%
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

import fedtailor as ft

table = load_breast_cancer(as_frame=True).frame
draw = np.random.default_rng(0)
size = table["mean radius"].rank(pct=True) + draw.normal(0, 0.2, len(table))
measured = ["radius", "texture", "area", "smoothness", "concavity", "symmetry"]
names = ["north", "east", "south", "west", "coast"]
hospitals = pd.DataFrame(
    {
        "patient": [f"P{number:04d}" for number in range(len(table))],
        "hospital": np.array(names)[pd.qcut(size, len(names), labels=False)],
        "stain": draw.choice(["Giemsa", "Papanicolaou"], len(table)),
        **{name: table[f"mean {name}"] for name in measured},
        "diagnosis": np.where(table["target"] == 1, "benign", "malignant"),
    }
)
hospitals = hospitals.mask((draw.random(hospitals.shape) < 0.05) & hospitals.columns.isin(["stain", "texture", "area"]))
hospitals.to_csv("hospitals.csv", index=False)
print(hospitals.head())

# %% [markdown]
# What is in the table? Types are found by looking at the cells; the patient's number is no feature. On the command
# line: `fedtailor data hospitals.csv --label-column diagnosis --client-column hospital`.

# %%
columns = {"label_column": "diagnosis", "client_column": "hospital"}
data = ft.load_data("hospitals.csv", **columns)
for column in data.columns:
    print(f"{column.name}: {column.kind}")

# %% [markdown]
# Train. Means, scales and categories are agreed on by what each hospital declares (counts, sums, squares), not by
# looking at all rows. Ditto gives each hospital a model of its own, close to the common one.

# %%
result = ft.run("ditto", data="hospitals.csv", **columns, rounds=15, lr=0.05)
for number, metrics in result.per_client.items():
    print(f"{result.names[number]:>6}: {100 * metrics.accuracy:.1f} % of {metrics.n_samples} test patients")

# %% [markdown]
# With so few test patients a hospital's accuracy is uncertain by several points. Export the models: each file holds
# the network, the names of the columns and the preprocessing.

# %%
files = ft.export(result, to="models", overwrite=True)
patients = hospitals[hospitals["hospital"] == "east"].drop(columns=["patient", "hospital", "diagnosis"])
predictions = ft.predict(files[result.names.index("east")], patients)
print(predictions.predicted[:5])

# %% [markdown]
# Columns are found by their names, so their order does not matter; a missing one is refused by its name.

# %%
shuffled = patients[patients.columns[::-1]]
assert (ft.predict(files[result.names.index("east")], shuffled).outputs == predictions.outputs).all()
try:
    ft.predict(files[0], patients.drop(columns="area"))
except ft.FedtailorError as error:
    print(error)
