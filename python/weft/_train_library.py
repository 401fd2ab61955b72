"""libweft_train, loaded when weft.train is imported: from the folder of libweft, else by the dynamic
loader."""
import ctypes
from pathlib import Path

from . import _api, _train_api
from ._library import SONAME, Library, library_file

NAME = SONAME.replace("libweft", "libweft_train")


def _load():
    own = Path(library_file()).parent / NAME
    try:
        return ctypes.CDLL(str(own) if own.exists() else NAME)
    except OSError as error:
        raise ImportError(f"weft.train: {NAME} cannot be loaded: {error}; expected it in {own.parent}, beside libweft, or where the dynamic loader looks "
                          "(LD_LIBRARY_PATH): libweft built without WEFT_TRAIN has none") from None


lib = Library(_load(), _train_api.FUNCTIONS)


def make(kind):
    """A struct as its initialiser in weft_train.h makes it."""
    return _api.make(kind, _train_api.INITIAL)
