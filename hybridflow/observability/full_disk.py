"""Recognizes errors of a full disk, a disk quota and a limit on the size of a file."""

import errno
import os

_CAUSES = {
    errno.ENOSPC: "The disk is full",
    errno.EDQUOT: "The disk quota is used up",
    errno.EFBIG: "The file is too large for the file system or for the limit of this process (ulimit -f)",
}


def why_full(error: BaseException) -> str | None:
    """The reason why nothing can be written, as the beginning of a sentence; None for other errors.

    Errors of libraries and workers are recognized by their message, since their number is lost.
    """
    for number, cause in _CAUSES.items():
        is_number = isinstance(error, OSError) and error.errno == number
        if is_number or os.strerror(number) in str(error) or f"os error {number}" in str(error):
            return cause
    return None
