# %% [markdown]
# # Wearables: thirty people, and which method for them?
#
# A wrist sensor measures acceleration in three directions. Thirty people do four activities; a window of two seconds
# is a sample. People differ: in their pace, in how they wear the sensor. Windows overlap, so those of one recording
# must stay on one side of the split, or the test would be of samples that were half seen in training.
#
# The signals are simulated here, so that the example needs no download. Your own windows go the same way: an npz file
# with `x` (windows, directions, times), `y`, `client` and `group`.

# %%
import numpy as np

import fedtailor as ft

RATE, LENGTH, STEP = 20, 40, 20  # measurements a second, of a window, between windows
ACTIVITIES = {"resting": (0.0, 0.05), "walking": (1.8, 1.0), "stairs": (1.5, 1.3), "running": (2.7, 2.5)}


def recording(activity, person, draw):
    """Six seconds of acceleration of one person."""
    pace, strength = ACTIVITIES[activity]
    time = np.arange(6 * RATE) / RATE + draw.random()
    swing = np.sin(2 * np.pi * pace * person["pace"] * time) + 0.3 * np.sin(4 * np.pi * pace * person["pace"] * time)
    body = strength * person["strength"] * np.stack([swing, np.roll(swing, 3), 0.5 * swing])
    return person["turn"] @ (body + np.array([[0], [0], [1]])) + draw.normal(0, 0.3, body.shape)


draw = np.random.default_rng(0)
x, y, client, group = [], [], [], []
for number in range(30):
    turn = np.linalg.qr(np.eye(3) + draw.normal(0, 0.2, (3, 3)))[0]  # how the sensor is worn
    person = {"pace": draw.uniform(0.8, 1.2), "strength": draw.uniform(0.6, 1.4), "turn": turn}
    for repetition in range(3):
        for activity in ACTIVITIES:
            signal = recording(activity, person, draw)
            starts = range(0, signal.shape[1] - LENGTH + 1, STEP)
            x += [signal[:, start : start + LENGTH] for start in starts]
            y += [activity] * len(starts)
            client += [f"person {number:02d}"] * len(starts)
            group += [f"{number}-{repetition}-{activity}"] * len(starts)
np.savez("wearables.npz", x=np.float32(x), y=y, client=client, group=group)

# %% [markdown]
# Which method fits? `advise` races several on validation data, and says if none is better than one model for all.

# %%
settings = {"data": "wearables.npz", "model": "cnn1d:16", "rounds": 10, "epochs": 1, "optimizer": "adam", "lr": 0.01}
advice = ft.advise(**settings, budget=5)
print(advice)

# %% [markdown]
# `tune` chooses a method's settings on validation data, with the same number of trials for each.

# %%
tuning = ft.tune(["local", "fedrep"], **settings, trials=2)
print(tuning)

# %% [markdown]
# [Comparing](comparing.ipynb) goes on from here: the same settings, several seeds, and who loses.
