"""What a log keeps."""


def errors_with_frames(records):
    """Return the errors that a kept log would hold on to with their frames.

    On Python 3.12 and 3.13 these lead on to whoever awaited what has failed.
    """
    args = [arg for record in records if isinstance(record.args, tuple) for arg in record.args]
    args += [record.exc_info[1] for record in records if record.exc_info]
    return [arg for arg in args if isinstance(arg, BaseException) and arg.__traceback__ is not None]
