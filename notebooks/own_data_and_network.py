# %% [markdown]
# # Your own arrays, network, loss and metric
#
# Whatever you can put into arrays and into an `nn.Module` can be federated. (A table with text and empty cells is
# simpler still: see [hospitals](hospitals.ipynb).)
#
# Here six offices scan forms, each with a scanner of its own. The images are real (handwritten digits); that a
# scanner darkens, bleaches or mirrors them is made up here.

# %%
import numpy as np

import fedtailor as ft

digits = ft.load_data("digits")
images = (255 * digits.x[:, 0]).round().numpy().astype(np.uint8)  # bytes, as a file of images has them
labels = digits.y.numpy()
scanners = {
    "berlin": lambda x: x,
    "cairo": lambda x: x // 2,
    "delhi": lambda x: x // 4,
    "lima": lambda x: 128 + x // 2,
    "oslo": lambda x: 64 + x // 2,
    "tokyo": lambda x: x[:, :, ::-1],
}
print(images.shape, images.dtype)

# %% [markdown]
# **Data.** A dictionary has an entry for each client; its key is the client's name everywhere. An entry is a pair (x,
# y), or a dictionary with `x`, `y` and, if you like, `group` (samples that must stay together, such as those of one
# form) and `split`. Images of bytes become numbers from 0 to 1. A list of pairs does as well, and so does an npz
# file.

# %%
offices = {}
for number, (name, scan) in enumerate(scanners.items()):
    x, y = scan(images[number::6]), labels[number::6]
    offices[name] = {"x": np.ascontiguousarray(x), "y": y, "group": np.arange(len(y)) // 5}  # a form has five digits
print({name: office["x"].shape for name, office in offices.items()})

# %% [markdown]
# **Network.** Any `nn.Module` that returns one tensor. It is made with the shape of a sample and the number of
# classes, if it has parameters of such names. The head is what data pass through last, here `classifier`.

# %%
from torch import nn


class Reader(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        channels, height, width = input_shape
        self.classifier = nn.Linear(64, num_classes)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * (height // 2) * (width // 2), 64),
            nn.ReLU(),
        )

    def forward(self, x):
        return self.classifier(self.features(x))


# %% [markdown]
# **Loss and metric** are functions of outputs and targets. A loss is a mean over samples. A metric decides which
# method is best, in its direction.


# %%
def focal(outputs, targets):
    """Cross-entropy that counts samples less which are right already."""
    loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def mistakes(outputs, targets):
    """Wrong digits in a hundred."""
    return 100 * (outputs.argmax(1) != targets).float().mean()


mistakes.higher_is_better = False

# %% [markdown]
# All four go in as objects. Each office has 60 images to train on. FedBN keeps what BatchNorm learns of a scanner's
# brightness at the office, and shares the rest.

# %%
own = {"data": offices, "model": Reader, "loss": focal, "metric": mistakes}
training = {"rounds": 10, "epochs": 2, "batch": 10, "optimizer": "adam", "lr": 0.003, "max_train": 60}
results = {method: ft.run(method, **own, **training) for method in ("local", "fedavg", "fedbn")}
for method, result in results.items():
    print(f"{method:>7}: {result.value:5.2f} wrong in a hundred")
print(*results["fedbn"].setup.lines(), sep="\n")

# %% [markdown]
# Office by office, with 60 test images each: one image is 1.7 in a hundred, and this is one seed. Offices whose
# scanners differ in brightness win by learning together. Tokyo's mirrors the digits, about which the others know
# nothing.

# %%
for number, name in enumerate(results["local"].names):
    wrong = {method: result.per_client[number].own for method, result in results.items()}
    print(f"{name:>7}:", ", ".join(f"{method} {value:5.2f}" for method, value in wrong.items()))

# %% [markdown]
# A model file has the network's values, and the name of your class. To predict, give the class again: a file never
# brings code along.

# %%
file = ft.export(results["fedbn"], client=0, to="models", overwrite=True)[0]
print(ft.predict(file, offices["berlin"]["x"][:5], model=Reader).predicted, offices["berlin"]["y"][:5])
