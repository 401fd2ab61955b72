"""A store that this process serves to others."""
import ctypes

from . import _api, errors
from ._arguments import text
from ._handle import Handle
from ._library import lib
from .context import Context

__all__ = ["StoreServer"]


class StoreServer(Handle):
    """A table that this process serves to others, from a thread of weft's own, until it is closed. port 0:
    any that is free."""
    __slots__ = ("port", "address")
    _destroy = lib.store_server_destroy

    def __init__(self, context, *, port=0, host=None, secret=None, linger=None):
        options = _api.make(_api.weft_store_server_options)
        options.port, options.host, options.secret = errors.integer(port, "port"), text(host, "host"), text(secret, "secret")
        options.linger_ns = errors.nanoseconds(linger, "linger")
        handle = ctypes.c_void_p()
        errors.call(lib.store_server_create, errors.instance(context, Context, "context")._handle, ctypes.byref(options), ctypes.byref(handle))
        super().__init__(handle.value)
        number, address = ctypes.c_int32(), ctypes.c_char_p()
        errors.call(lib.store_server_port, self._handle, ctypes.byref(number))
        errors.call(lib.store_server_address, self._handle, ctypes.byref(address))
        self.port, self.address = number.value, address.value.decode()
