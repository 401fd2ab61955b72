"""Where ranks meet before they have a group: small tables of keys and values. Any thread; several threads
may use one store at once."""
import ctypes

from . import _api, errors
from ._arguments import text
from ._handle import Handle, Made, blocking
from ._library import lib

__all__ = ["Store", "new_secret", "secret_from_env"]


def _sized(value, name):
    """Bytes and how many there are."""
    data = errors.octets(value, name)
    return data, len(data)


class Store(Handle):
    """One way to a table. Made by `local`, `file` or `tcp`. A group keeps what it needs of it."""
    __slots__ = ()
    _destroy = lib.store_destroy

    @classmethod
    def local(cls):
        """For threads of one process: made once, used by each of them."""
        return cls._make(lib.store_create_local)

    @classmethod
    def file(cls, path, limit=None):
        """In the file at `path`, which is made where it is absent; for processes that share a file system
        on which flock works. `limit`: seconds that each request waits for another process that has the
        file; None: 30."""
        return cls._make(lib.store_create_file, text(str(path), "path"), errors.nanoseconds(limit, "limit"))

    @classmethod
    def tcp(cls, host, port, secret=None, limit=None):
        """A client of a StoreServer. Blocks until it is there, at most `limit` seconds (None: five
        minutes)."""
        return cls._make(lib.store_create_tcp, text(host, "host"), errors.integer(port, "port"), text(secret, "secret"), errors.nanoseconds(limit, "limit"))

    @classmethod
    def _make(cls, function, *args):
        made = Made(lib.store_destroy)
        blocking(function, *args, ctypes.byref(made))
        return cls(made)

    def set(self, key, value, limit=None):
        """value: bytes, up to 1 MiB."""
        blocking(lib.store_set, self, text(key, "key"), *_sized(value, "value"), errors.nanoseconds(limit, "limit"))

    def get(self, key, limit=None):
        """Blocks until the key exists, at most `limit` seconds (None: five minutes)."""
        return self._text(lib.store_get, key, errors.nanoseconds(limit, "limit"))

    def try_get(self, key, limit=None):
        """The value now; None where the key does not exist."""
        return self._text(lib.store_try_get, key, errors.nanoseconds(limit, "limit"))

    def _text(self, function, key, *args):
        made = Made(lib.text_destroy)
        blocking(function, self, text(key, "key"), *args, ctypes.byref(made))
        value = made.take()
        return None if value is None else errors.take_text(value)

    def add(self, key, delta=1, limit=None):
        """Adds to a decimal counter (absent: 0); what it is then."""
        value = ctypes.c_int64()
        blocking(lib.store_add, self, text(key, "key"), errors.integer(delta, "delta", 64), errors.nanoseconds(limit, "limit"), ctypes.byref(value))
        return value.value

    def compare_set(self, key, expected, desired, limit=None):
        """Sets the key to `desired` where it holds `expected` (absent counts as b""); what it holds then."""
        return self._text(lib.store_compare_set, key, *_sized(expected, "expected"), *_sized(desired, "desired"), errors.nanoseconds(limit, "limit"))

    def remove(self, key, limit=None):
        """Takes the key out; nothing where there is none."""
        blocking(lib.store_remove, self, text(key, "key"), errors.nanoseconds(limit, "limit"))


def new_secret():
    """A secret at random, for a store off loopback."""
    secret = ctypes.c_void_p()
    errors.call(lib.store_secret_create, ctypes.byref(secret))
    return errors.take_text(secret).decode()


def secret_from_env():
    """The contents of WEFT_STORE_SECRET_FILE, or WEFT_STORE_SECRET; "" if neither is set."""
    secret = ctypes.c_void_p()
    errors.call(lib.store_secret_from_env, ctypes.byref(secret))
    return errors.take_text(secret).decode()
