"""MedMNIST: medical images, one npz file a data set, with the authors' train, validation and test parts."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedtailor._common.errors import FedtailorError
from fedtailor.data.arrays import Arrays, as_features, numbered_classes, read_arrays, several_labels
from fedtailor.data.dataset import TEST, TRAIN, VALIDATION, DataInfo, Dataset, DataSets, require
from fedtailor.data.foreign_files import damaged

PARTS = {"train": TRAIN, "val": VALIDATION, "test": TEST}
ORGANS = (
    "bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left",
    "lung-right", "pancreas", "spleen",
)  # fmt: skip
CLASSES: dict[str, tuple[str, ...]] = {
    "pathmnist": (
        "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
        "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
    ),
    "dermamnist": (
        "actinic keratoses", "basal cell carcinoma", "benign keratosis-like lesions", "dermatofibroma",
        "melanoma", "melanocytic nevi", "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "chestmnist": (
        "atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia", "pneumothorax",
        "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia",
    ),
    "retinamnist": ("0", "1", "2", "3", "4"),
    "breastmnist": ("malignant", "normal or benign"),
    "bloodmnist": (
        "basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte", "monocyte",
        "neutrophil", "platelet",
    ),
    "tissuemnist": (
        "collecting duct, connecting tubule", "distal convoluted tubule", "glomerular endothelial cells",
        "interstitial endothelial cells", "leukocytes", "podocytes", "proximal tubule segments",
        "thick ascending limb",
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
}  # fmt: skip
DESCRIPTIONS = {
    "pathmnist": "colon tissue, colour",
    "dermamnist": "skin lesions, colour",
    "octmnist": "retinal tomography, grey",
    "pneumoniamnist": "chest X-rays, grey",
    "chestmnist": "chest X-rays with several labels, grey",
    "retinamnist": "fundus images by severity, colour",
    "breastmnist": "breast ultrasound, grey",
    "bloodmnist": "blood cells, colour",
    "tissuemnist": "kidney cells, grey",
    "organamnist": "organs in axial CT slices, grey",
    "organcmnist": "organs in coronal CT slices, grey",
    "organsmnist": "organs in sagittal CT slices, grey",
}


def read_medmnist(info: DataInfo, root: Path, variant: str) -> Dataset:
    require(info, root)
    path = root / info.files[0]
    return from_arrays(info.name, path, read_arrays(path), CLASSES[info.name])


def is_medmnist(arrays: Arrays) -> bool:
    return _keys("train", arrays) is not None


def from_arrays(name: str, path: Path, arrays: Arrays, classes: tuple[str, ...] = ()) -> Dataset:
    """Put all parts into one data set; without `classes`, these are called 0, 1, 2, …"""
    xs: list[Tensor] = []
    ys, parts = [], []
    for part, number in PARTS.items():
        keys = _keys(part, arrays)
        if keys is None:
            raise damaged(path, f"there are no {part}_images and {part}_labels in it")
        x, y = as_features(arrays[keys[0]], name), arrays[keys[1]]
        if x.ndim == 0 or y.ndim == 0:
            raise damaged(path, f"its {part} part has no samples")
        several = several_labels(y)
        if several is None and (y.size != len(y) or y.dtype.kind not in "iu"):
            raise FedtailorError(
                f"The labels of {path} have shape {y.shape} and type {y.dtype}: fedtailor reads data with "
                "one class number per sample, or several labels of 0 and 1."
            )
        if len(x) != len(y):
            raise damaged(path, f"its {part} part has {len(x)} images but {len(y)} labels")
        if xs and (x.shape[1:], x.dtype) != (xs[0].shape[1:], xs[0].dtype):
            raise damaged(path, f"its {part} images have shape {tuple(x.shape[1:])}, others {tuple(xs[0].shape[1:])}")
        xs.append(x)
        ys.append(several[0] if several else torch.from_numpy(y.reshape(-1).astype(np.int64)))
        parts.append(torch.full((len(y),), number, dtype=torch.uint8))
    if len({y.shape[1:] for y in ys}) > 1:
        raise damaged(path, "its parts differ in their number of labels")
    y_all = torch.cat(ys)
    names = classes or (numbered_classes(y_all, name) if y_all.dim() == 1 else tuple(map(str, range(y_all.shape[1]))))
    return Dataset(name, torch.cat(xs), y_all, names, torch.cat(parts))


def _keys(part: str, arrays: Arrays) -> tuple[str, str] | None:
    for keys in ((f"{part}_images", f"{part}_labels"), (f"x_{part}", f"y_{part}")):
        if all(key in arrays for key in keys):
            return keys
    return None


DATA_SETS: DataSets = tuple(
    (
        DataInfo(name, DESCRIPTIONS[name], len(classes), (f"{name}.npz",), "https://medmnist.com"),
        read_medmnist,
    )
    for name, classes in CLASSES.items()
)
