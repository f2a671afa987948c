# %% [markdown]
# # Adapters: a large backbone, small messages
#
# A backbone was trained elsewhere. Clients do not send it around: they train low-rank adapters (LoRA) and the head.
# Here the backbone is a network for digits that has seen only 0 to 4; the clients have all ten.

# %%
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

import fedtailor as ft


class Backbone(nn.Module):
    """Three wide layers and a head."""

    def __init__(self, shape, classes):
        super().__init__()
        size = torch.Size(shape).numel()
        self.body = nn.Sequential(nn.Flatten(), *self.layer(size, 256), *self.layer(256, 256), *self.layer(256, 256))
        self.head = nn.Linear(256, classes)

    @staticmethod
    def layer(inputs, outputs):
        return nn.Linear(inputs, outputs), nn.ReLU()

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
old = y < 5
pretrained = Backbone((64,), 5)
optimizer = torch.optim.Adam(pretrained.parameters(), lr=0.001)
for _ in range(60):
    loss = nn.functional.cross_entropy(pretrained(x[old]), y[old])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
save_file(pretrained.state_dict(), "backbone.safetensors")

# %% [markdown]
# The same federation twice: the whole network, and adapters of rank 4 on the frozen backbone.

# %%
clients = [(x[k::10], y[k::10]) for k in range(10)]
settings = {"data": clients, "model": Backbone, "weights": "backbone.safetensors", "rounds": 5, "epochs": 2, "lr": 0.05}
for name, extra in {"whole network": {}, "adapters": {"lora": 4}}.items():
    result = ft.run("fedavg", **settings, **extra)
    sent = result.rounds[0].bytes_up / 10
    print(f"{name}: {sent / 1000:,.0f} kB a client and round, accuracy {100 * result.accuracy:.1f} %")

# %% [markdown]
# The exported file holds the plain network, with the adapters multiplied in.

# %%
file = ft.export(result, to="models", client=0, overwrite=True)[0]
print(ft.predict(file, x[:5], model=Backbone).predicted)
