"""Every exception that kvmoor raises on purpose.

    KvmoorError
    +-- ClosedError                    you closed it
    +-- BrokenError                    the world broke it; the cause is in ``__cause__``
    |   +-- DeviceError                a device failed or refused a copy
    +-- BusyError                      two users of what only one may use
    +-- NoRoomError                    memory or slots do not suffice
    +-- TransferTimeoutError           a wait passed its deadline (also a TimeoutError)
    +-- CorruptDataError               stored bytes are not what was stored: discard them
    +-- SettingsError                  a setting cannot be used (also a ValueError)
    |   +-- LayoutError                a description of device tensors cannot be used
    +-- RequestError                   one call's arguments cannot be used (also a ValueError)
    +-- UnsupportedError               a model or cache that kvmoor does not handle
    +-- MissingDependencyError         an optional package is absent (also an ImportError)

A miss is a value, never an exception. Messages say what was asked, what was found and what to do.
"""


class KvmoorError(Exception):
    """Group every error of this package."""


class ClosedError(KvmoorError):
    """Report the use of something that its owner has closed."""


class BrokenError(KvmoorError):
    """Report something that the world broke; ``__cause__`` holds the reason."""


class DeviceError(BrokenError):
    """Report a device that failed, or that refused a copy."""


class BusyError(KvmoorError):
    """Report a second user of something that only one may use."""


class NoRoomError(KvmoorError):
    """Report that memory or slots do not suffice; nothing was allocated."""


class TransferTimeoutError(KvmoorError, TimeoutError):
    """Report a wait that passed its deadline; what was waited for may still be running."""


class CorruptDataError(KvmoorError):
    """Report stored bytes that differ from what was stored; they must be discarded."""


class SettingsError(KvmoorError, ValueError):
    """Report a setting that cannot be used; nothing was allocated."""


class LayoutError(SettingsError):
    """Report a description of device tensors that cannot be used."""


class RequestError(KvmoorError, ValueError):
    """Report arguments of one call that cannot be used; nothing was changed or copied."""


class UnsupportedError(KvmoorError):
    """Report a model or a cache that kvmoor does not handle."""


class MissingDependencyError(KvmoorError, ImportError):
    """Report an optional package that is not installed; the message names the command that installs it."""
