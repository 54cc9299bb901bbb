"""To be written."""


def add_parser(kinds):
    pass
