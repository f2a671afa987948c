# %% [markdown]
# # Next character: text on many devices
#
# Each client has texts of its own and learns to continue them, character by character. The texts are chapters of
# Python's reference manual, which come with Python; a chapter is a client.

# %%
from pydoc_data.topics import topics

import numpy as np

import fedtailor as ft

LENGTH, CHAPTERS, CHARACTERS = 10, 8, 1200
chapters = sorted(topics, key=lambda name: -len(topics[name]))[:CHAPTERS]
alphabet = sorted(set("".join(topics[name][:CHARACTERS] for name in chapters)))
token = {character: number + 1 for number, character in enumerate(alphabet)}  # 0 is left for padding


def windows(text):
    """Every second window of a text as tokens, and the character after each."""
    tokens = np.array([token[character] for character in text])
    starts = np.arange(0, len(tokens) - LENGTH - 1, 2)
    return np.stack([tokens[s : s + LENGTH] for s in starts]), tokens[starts + LENGTH] - 1


data = {name: windows(topics[name][:CHARACTERS]) for name in chapters}
print({name: len(y) for name, (x, y) in data.items()})

# %% [markdown]
# Whole numbers stay whole numbers: the network begins with an embedding.

# %%
settings = {"data": data, "model": "gru:32", "rounds": 6, "epochs": 2, "optimizer": "adam", "lr": 0.01, "batch": 32}
comparison = ft.compare(["local", "fedavg", "fedper"], **settings, seeds=[0])
print(comparison)

# %% [markdown]
# After six rounds, whoever learns alone is ahead: the table may say that, too. Look at "gain over local" and at the
# clients that lose before you decide for a federation.
