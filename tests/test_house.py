"""Rules of the house that no other tool checks."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for shelf in ("pipelined", "transports", "models") for path in (ROOT / shelf).rglob("*.py"))
NAMES = {path: path.relative_to(ROOT).as_posix() for path in SOURCES}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

MOST_LINES = 400
MOST_FUNCTION_LINES = 60
LONG_FILES = {
    "pipelined/messages.py": "every struct that crosses a socket stands in one place",
}

TIME_CALLS = {"time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep"}
OWN_TIME = {
    "pipelined/clock/base.py": "the clock itself",
}
"""Where real time is read: elsewhere it comes from the injected clock."""

LOOSE_TASKS = {"create_task", "ensure_future", "get_event_loop", "new_event_loop"}
OWN_TASKS = {
    "pipelined/pipeline/driver.py": "races an awaitable that it was given against the loss of a rank, and cancels it",
    "pipelined/llm/offline.py": "a loop in a thread of its own, for callers without one",
    "pipelined/rank/host.py": "closes a rank that failed to the end, whatever cancels it meanwhile",
    "pipelined/testing/fuzz/play.py": "plays users who go away: holds their tasks and awaits them",
    "pipelined/pipeline/worlds.py": "the supervisor of ranks that are tasks: holds and awaits them",
    "pipelined/pipeline/process_world.py": "what a thread makes must be known to be ended, whatever cancels the wait",
    "pipelined/llm/epochs.py": "recovers beside whoever opened the engine: holds the task and awaits it",
}
"""Where tasks are made outside of a task group."""

OWN_PICKLES = {
    "pipelined/testing/payload_kit.py": "copies an object of its own process",
}
"""Where something is unpickled: never what came from a socket."""


def calls(tree: ast.AST, module: str, names: set[str]):
    """Lines that use `module.name`, or import it by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == module and node.attr in names:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == module and names & {n.name for n in node.names}:
            yield node.lineno


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without those of the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def functions(tree: ast.AST):
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_there_is_something_to_check():
    assert len(SOURCES) > 100


def test_no_file_is_long():
    lengths = {NAMES[path]: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    long = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert {name: length for name, length in long.items() if name not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(long), "an exception that is none any more"


def test_no_function_is_long():
    long = {
        f"{NAMES[path]}:{node.name}": length_of(node)
        for path in SOURCES
        for node in functions(TREES[path])
        if length_of(node) > MOST_FUNCTION_LINES
    }
    assert long == {}


def test_time_comes_from_the_clock():
    found = {
        f"{NAMES[path]}:{line}"
        for path in SOURCES
        if NAMES[path] not in OWN_TIME
        for line in calls(TREES[path], "time", TIME_CALLS)
        if not NAMES[path].startswith(("pipelined/cli/", "pipelined/testing/"))  # they measure real time
    }
    assert found == set()


def test_tasks_live_in_groups():
    found = {
        f"{NAMES[path]}:{line}"
        for path in SOURCES
        if NAMES[path] not in OWN_TASKS
        for line in calls(TREES[path], "asyncio", LOOSE_TASKS)
    }
    assert found == set()


def test_loops_make_no_tasks():
    """`get_running_loop().create_task(...)` and `loop.create_task(...)` are loose tasks too."""
    found = set()
    for path in SOURCES:
        if NAMES[path] in OWN_TASKS:
            continue
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create_task":
                owner = ast.unparse(node.func.value)
                if "loop" in owner:
                    found.add(f"{NAMES[path]}:{node.lineno}")
    assert found == set()


def test_nothing_is_unpickled():
    """Stages of one's own reach child processes by multiprocessing's spawn, and only there."""
    reading = {"load", "loads", "Unpickler"}
    found = {
        f"{NAMES[path]}:{line}"
        for path in SOURCES
        if NAMES[path] not in OWN_PICKLES
        for module in ("pickle", "marshal", "shelve", "dill", "cloudpickle")
        for line in calls(TREES[path], module, reading)
    }
    assert found == set()


def test_shelves_are_not_imported_by_their_folder():
    found = {NAMES[path] for path in SOURCES if set(imported(TREES[path])) & {"transports", "models"}}
    assert found == set()


@pytest.mark.parametrize("path", SOURCES, ids=NAMES.values())
def test_opening(path):
    """A module says what it is, and annotations cost nothing at run time."""
    tree = TREES[path]
    assert ast.get_docstring(tree), "a module begins with what it knows"
    if list(functions(tree)):
        futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        assert futures, "from __future__ import annotations"


def test_comments_leave_no_loose_ends():
    found = []
    for path in SOURCES:
        reader = io.StringIO(path.read_text(encoding="utf-8")).readline
        for token in tokenize.generate_tokens(reader):
            if token.type == tokenize.COMMENT and any(word in token.string for word in ("TODO", "FIXME", "XXX")):
                found.append(f"{NAMES[path]}:{token.start[0]}")
    assert found == []
