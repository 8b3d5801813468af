"""The roles that run inside the code reward's sandbox.

- `script`: the code under test as a program. Its output is compared outside.
- `serve`: the code under test as a module, in one sandbox: it defines its functions, then calls them on request.
- `test`: the tests, in another sandbox. The names they use that are not their own stand for functions of the code
  under test; calling one sends the arguments to `serve` and brings back the result.

So the assertions, the expected values and the report of the verdict are in a process in which the code under test
never runs. Between the two go plain values, written in JSON and never pickled: an object with an `__eq__` that says
yes to everything arrives as an opaque handle, which equals only itself.
"""

import ast
import base64
import builtins
import json
import linecache
import os
import struct
import symtable
import sys
from collections import Counter, OrderedDict, defaultdict
from types import ModuleType


MAX_MESSAGE_BYTES = 32 << 20
MAX_ITERATED = 1_000_000


class CandidateError(Exception):
    """The code under test failed, ended, or cannot be reached."""


# Values that pass between the two sandboxes.


def encode(value, keep):
    """JSON form of a value; `keep(object)` gives the number of a handle for what is no plain value."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return {"int": hex(value)}  # decimal digits are limited in number
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: base64.b64encode(value).decode()}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(element, keep) for element in value]}
    if kind in (dict, Counter, OrderedDict, defaultdict):
        return {"dict": [[encode(key, keep), encode(element, keep)] for key, element in value.items()]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return {"handle": keep(value)}


def decode(data, resolve):
    """Value of a JSON form; `resolve(number)` gives what a handle stands for."""
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind in ("bytes", "bytearray"):
        raw = base64.b64decode(content)
        return raw if kind == "bytes" else bytearray(raw)
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(decode(element, resolve) for element in content)
    if kind == "dict":
        return {decode(key, resolve): decode(element, resolve) for key, element in content}
    return resolve(content)


def read_exactly(descriptor, count):
    parts = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive(descriptor):
    (length,) = struct.unpack("!I", read_exactly(descriptor, 4))
    if length > MAX_MESSAGE_BYTES:
        raise EOFError
    return json.loads(read_exactly(descriptor, length))


def send(descriptor, message):
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    data = struct.pack("!I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def new_module(name, filename):
    """An empty module, known to Python: dataclasses, pickle and inspect look for a class's module in `sys.modules`."""
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = filename
    return module


def execute(source, module, filename, tree=None):
    """Run a source in a module, in another form of it where `tree` is given."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(tree or source, filename, "exec"), vars(module))


# The code under test.


def run_script(config):
    sys.argv = ["main.py"]
    execute(config["code"], new_module("__main__", "main.py"), "main.py")


def run_serve(config):
    module = new_module("candidate", "candidate.py")
    channel = os.dup(0)
    os.dup2(2, 0)
    execute(config["code"], module, "candidate.py")
    kept = []

    def keep(value):
        kept.append(value)
        return len(kept) - 1

    while True:
        try:
            request = receive(channel)
        except EOFError:
            return
        try:
            target = vars(module)[request["name"]] if "name" in request else kept[request["handle"]]
            arguments = decode(request["arguments"], kept.__getitem__)
            if request["do"] == "call":
                result = target(*arguments[0], **arguments[1])
            elif request["do"] == "get":
                result = getattr(target, arguments[0])
            else:
                result = [element for element, _ in zip(target, range(MAX_ITERATED))]  # noqa: B905
            # The arguments go back, for functions that change them in place.
            reply = {"result": encode(result, keep), "arguments": encode(arguments, keep)}
        except Exception as error:
            reply = {"error": type(error).__name__, "message": str(error)[:500]}
        send(channel, reply)


# The tests.


class Remote:
    """The code under test, as the process with the tests sees it."""

    def __init__(self, channel):
        self.channel = channel

    def request(self, do, reference, arguments):
        send(self.channel, {"do": do, **reference, "arguments": encode(arguments, self._keep)})
        try:
            reply = receive(self.channel)
            if "error" in reply:
                kind = getattr(builtins, str(reply["error"]), None)
                # StopIteration would end a map() of the tests as if all were done.
                deceptive = (AssertionError, StopIteration, StopAsyncIteration)
                if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind in deceptive:
                    kind = CandidateError
                raise kind(str(reply["message"]))
            result = decode(reply["result"], self._handle)
            for mine, theirs in zip(arguments[0], decode(reply["arguments"], self._handle)[0], strict=True):
                if type(mine) is type(theirs) and mine != theirs:
                    if isinstance(mine, (list, bytearray)):
                        mine[:] = theirs
                    elif isinstance(mine, (dict, set)):
                        mine.clear()
                        mine.update(theirs)
            return result
        except (EOFError, OSError):
            raise CandidateError("the code under test ended") from None

    def _handle(self, number):
        return Handle(self, {"handle": int(number)})

    def _keep(self, value):
        if isinstance(value, Handle) and "handle" in value._reference:
            return value._reference["handle"]
        raise TypeError(f"a {type(value).__name__} cannot be passed to the code under test")


class Handle:
    """A function or object of the code under test. It can be called, iterated, read and passed back."""

    def __init__(self, remote, reference):
        self._remote = remote
        self._reference = reference

    def __call__(self, *arguments, **keywords):
        return self._remote.request("call", self._reference, [list(arguments), keywords])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.request("get", self._reference, [name])

    def __iter__(self):
        return iter(self._remote.request("iterate", self._reference, [[]]))


def reported_asserts(tree):
    """Places `(statements, index)` of the asserts whose outcome is reported one by one.

    Those are the statements of the module and of a function `check` (as in HumanEval), which are sure to be run. An
    `assert` in a loop, a condition or a `try` keeps its meaning and ends the test when it fails. `assert True`, which
    HumanEval has, says nothing about the code.
    """
    bodies = [tree.body]
    bodies += [node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    return [
        (body, index)
        for body in bodies
        for index, node in enumerate(body)
        if isinstance(node, ast.Assert) and any(isinstance(part, ast.Name) for part in ast.walk(node.test))
    ]


def with_reports(tree):
    """Turn each reported `assert` into a call that reports its outcome and goes on."""
    for body, index in reported_asserts(tree):
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        condition = ast.Lambda(args=nothing, body=body[index].test)
        call = ast.Call(func=ast.Name("__report_assert__", ast.Load()), args=[condition], keywords=[])
        body[index] = ast.copy_location(ast.Expr(call), body[index])
    return ast.fix_missing_locations(tree)


def run_test(config):
    """Write `+` or `-` for each assert, and at the end of each test `.`, or `!` for a test that was broken off."""
    remote, verdicts = Remote(os.dup(0)), os.dup(1)
    os.dup2(2, 0)
    os.dup2(2, 1)
    module = new_module("tests", "setup.py")
    names = vars(module)

    def report_assert(condition):
        try:
            passed = bool(condition())
        except Exception:
            passed = False
        os.write(verdicts, b"+" if passed else b"-")

    def run_part(source, filename):
        for name in global_names(source):
            if name not in names and not hasattr(builtins, name):
                names[name] = Handle(remote, {"name": name})
        execute(source, module, filename, with_reports(ast.parse(source)))

    names["__report_assert__"] = report_assert
    if config["entry_point"]:
        # Also where it has the name of a builtin, which is otherwise the builtin.
        names[config["entry_point"]] = Handle(remote, {"name": config["entry_point"]})
    run_part(config["setup"], "setup.py")
    for source in config["tests"]:
        try:
            run_part(source, "test.py")
            os.write(verdicts, b".")
        except Exception:
            os.write(verdicts, b"!")


def global_names(source):
    """Names that a module reads as globals and does not define, import or bind; builtins among them."""
    tables = [symtable.symtable(source, "source", "exec")]
    for table in tables:
        tables += table.get_children()
    symbols = [(table, symbol) for table in tables for symbol in table.get_symbols()]
    of_module = [symbol for table, symbol in symbols if table is tables[0] or symbol.is_global()]
    bound = {symbol.get_name() for symbol in of_module if symbol.is_assigned() or symbol.is_imported()}
    return {symbol.get_name() for symbol in of_module if symbol.is_referenced()} - bound


ROLES = {"script": run_script, "serve": run_serve, "test": run_test}


def run(config):
    """Run the role that the configuration names; does not return."""
    ROLES[config["role"]](config)
