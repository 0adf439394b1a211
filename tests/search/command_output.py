"""What the commands of search print, and how they end."""

import pytest

from pfml.cli import main
from pfml.cli.input_images import UNREADABLE_STATUS


def said(capsys, *arguments):
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def said_in_part(capsys, *arguments):
    """What a command prints that leaves out files, which its status says."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == UNREADABLE_STATUS
    return capsys.readouterr().out


def failure(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return str(exit_.value.code)
