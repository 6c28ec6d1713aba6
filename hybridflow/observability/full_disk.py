"""Recognizes errors of a full disk, a disk quota and a limit on the size of a file."""

import errno

_SAID = {
    errno.ENOSPC: "The disk is full",
    errno.EDQUOT: "The disk quota is used up",
    errno.EFBIG: "The file is too large for the file system or for the limit of this process (ulimit -f)",
}
_WORDS = {
    errno.ENOSPC: ("No space left on device", "os error 28"),
    errno.EDQUOT: ("Disk quota exceeded", "os error 122"),
    errno.EFBIG: ("File too large", "os error 27"),
}
"""Messages of libraries and workers for an error whose number is lost."""


def why_full(error: BaseException) -> str | None:
    """Why nothing more can be written, as the beginning of a sentence; None for other errors."""
    if isinstance(error, OSError) and error.errno in _SAID:
        return _SAID[error.errno]
    found = (number for number, words in _WORDS.items() if any(word in str(error) for word in words))
    return next((_SAID[number] for number in found), None)
