"""A contact sheet: one image of each client side by side, as a PNG."""

from io import BytesIO
from math import ceil

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from fedtailor.data.client_data import FederatedData
from fedtailor.data.shifts import in_words

MOST = 40  # clients
IN_A_ROW = 10
SIDE, LINE = 84, 12  # pixels of an image, and of each line of text below it


def contact_sheet(data: FederatedData) -> bytes | None:
    """Draw one training image of each of the first clients, of a class that most of them have, with the client's name
    and shift below. None if samples are no images."""
    if not isinstance(data.x, Tensor) or data.x.ndim != 4 or data.x.shape[1] not in (1, 3):
        return None
    clients = range(min(data.n_clients, MOST))
    there = (data.counts("train")[: len(clients)] > 0).sum(0)
    common = int((there == there.max()).nonzero()[-1])
    shifts = [[in_words({name: values}) for name, values in shift.items()] for shift in data.each_shift]
    columns, height = min(len(clients), IN_A_ROW), SIDE + LINE * (1 + max(map(len, shifts))) + 6
    sheet = Image.new("RGB", (columns * (SIDE + 4), ceil(len(clients) / columns) * height), "white")
    pen, low = ImageDraw.Draw(sheet), -1.0 if float(data.x.mean()) < 0 else 0.0  # of pixels that are signed
    for client in clients:
        left, top = client % columns * (SIDE + 4) + 2, client // columns * height + 2
        sheet.paste(_image(data, client, common, low), (left, top))
        for line, words in enumerate((data.names[client], *shifts[client])):
            pen.text((left, top + SIDE + 1 + LINE * line), _short(words), fill="black")
    file = BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def _image(data: FederatedData, client: int, common: int, low: float) -> Image.Image:
    """Make a picture of a client's first training image of the common class, or of its first one."""
    x, y = data.train(client)
    assert isinstance(x, Tensor)
    labels = y if y.ndim == 1 else y.argmax(1)
    place = int((labels == common).int().argmax()) if data.targets == "classes" else 0
    pixels = ((x[place].double() - low) / (1.0 - low) * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    channels = pixels.repeat(3, axis=0) if len(pixels) == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(channels.transpose(1, 2, 0)))
    larger = SIDE / max(image.size)
    return image.resize((round(image.width * larger), round(image.height * larger)), Image.Resampling.BOX)


def _short(words: str) -> str:
    """Cut words to the width of an image; Pillow's own font has no letters but Latin ones."""
    words = words.encode("latin-1", "replace").decode("latin-1")
    return words if len(words) <= 15 else words[:14] + "."
