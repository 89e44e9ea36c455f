"""Files that come with the project: configs and vocabularies."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(name: str) -> Path:
    """The folder `name` (`bert_configs` or `vocab`): in the installed package, which has copies, or
    at the top of the checkout.
    """
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name
