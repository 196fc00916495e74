"""The keys that the installed DeepSpeed reads, found in its source without importing it.

DeepSpeed ignores most unknown keys, and its schema is spread over constants, `get_scalar_param` calls and pydantic
classes. `_Reader` therefore follows the settings through `DeepSpeedConfig.__init__` as an interpreter would: every
`settings.get(KEY, default)`, `settings[KEY]`, `KEY in settings` and `Model(**settings[KEY])` it meets is a key, in
whatever function the settings are handed to. It executes nothing, and takes 0.2 s instead of the 5 s of an import.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lavis_ds.errors import ConfigError

_UNKNOWN = object()
_SCALARS: dict[str, tuple[str, ...]] = {
    "bool": ("bool",), "int": ("int",), "float": ("float",), "str": ("str",), "Path": ("str",),
    "list": ("list",), "List": ("list",), "tuple": ("list",), "dict": ("dict",), "Dict": ("dict",),
}  # fmt: skip
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

# Read by DeepSpeed outside its configuration classes: by the pipeline engine, the samplers and the optimizers.
_EXTRA_KEYS = {"data_parallel_size": "int", "pipeline.use_reentrant": "bool", "train_batch_size": "int",
               "train_micro_batch_size_per_gpu": "int", "gradient_accumulation_steps": "int", "steps_per_print": "int",
               "data_efficiency.data_sampling.dynamic_batching.metrics_path": "str"}  # fmt: skip
_OPEN_BLOCKS = ("optimizer.params", "scheduler.params")


@dataclass(eq=False)
class Key:
    """One key: what its value may be, and the keys below it.

    Attributes:
        types: names of the Python types that the value may have; empty where the source does not say.
        choices: the only values allowed; empty where any value of the types is.
        bounds: such as `(">=", 0)`.
        nullable: null is allowed.
        takes_auto: DeepSpeed itself gives the value "auto" a meaning.
        is_open: DeepSpeed passes on keys that it does not name.
    """

    types: set[str] = field(default_factory=set)
    choices: tuple[Any, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()
    nullable: bool = False
    takes_auto: bool = False
    is_open: bool = False
    keys: dict[str, Key] = field(default_factory=dict)

    def child(self, name: str) -> Key:
        return self.keys.setdefault(name, Key())

    def note_default(self, default: Any) -> None:
        """Learn from the value that DeepSpeed takes where the key is left out."""
        if default is None:
            self.nullable = True
        elif default == "auto":
            self.takes_auto = True
        elif isinstance(default, (bool, int, float, str, list)):
            self.types.add(type(default).__name__)

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Key]]:
        """Every key below this one, with its dotted path."""
        for name, key in self.keys.items():
            yield prefix + name, key
            yield from key.walk(f"{prefix}{name}.")


@dataclass(frozen=True)
class Schema:
    """What the installed DeepSpeed understands. `removed` maps dotted paths to DeepSpeed's own words."""

    version: str
    root: Key
    removed: Mapping[str, str]


@cache
def installed_schema() -> Schema:
    """The schema of the DeepSpeed that `import deepspeed` would load, read from its source files.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("DeepSpeed is not installed.", hint="Run `pip install deepspeed`, or set run.engine: torch.")
    reader = _Reader(Path(spec.submodule_search_locations[0]))
    root = reader.read_config_class("deepspeed.runtime.config", "DeepSpeedConfig")
    for path, type_name in _EXTRA_KEYS.items():
        _at(root, path).types.add(type_name)
    for path in _OPEN_BLOCKS:
        _at(root, path).is_open = True
    removed = reader.constant("deepspeed.runtime.config", "_REMOVED_TOP_LEVEL_CONFIG_KEYS")
    nested = reader.constant("deepspeed.runtime.config", "_REMOVED_ZERO_CONFIG_KEYS")
    return Schema(
        version=importlib.metadata.version("deepspeed"),
        root=root,
        removed={**removed, **{f"zero_optimization.{name}": text for name, text in nested.items()}},
    )


def _at(root: Key, path: str) -> Key:
    for name in path.split("."):
        root = root.child(name)
    return root


class _Module:
    """Top-level names of one source file."""

    def __init__(self, name: str, file: Path) -> None:
        self.name = name
        self.package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        self.names: dict[str, ast.AST] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.stars: list[str] = []
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.names[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.names[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            self.add_import(node)

    def add_import(self, node: ast.ImportFrom) -> None:
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(source)
            else:
                self.imports[alias.asname or alias.name] = (source, alias.name)


@dataclass
class _Scope:
    """Where an expression is evaluated: its file, its variables (by source text) and the class that `self` is of."""

    module: _Module
    variables: dict[str, Any]
    owner: ast.ClassDef | None = None


class _Reader:
    """Follows the settings through DeepSpeed's source; values are constants, `Key`s of the settings, or unknown."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, _Module | None] = {}
        self._active: list[tuple[str, ...]] = []

    def read_config_class(self, module_name: str, class_name: str) -> Key:
        module = self._module(module_name)
        found = self._resolve(module, class_name) if module else None
        if found is None or not isinstance(found[1], ast.ClassDef):
            raise ConfigError(f"the installed DeepSpeed has no {module_name}.{class_name}.", expected="DeepSpeed 0.19")
        root = Key()
        self._construct(found[0], found[1], [root], {})
        return root

    def constant(self, module_name: str, name: str) -> dict[str, str]:
        """A dictionary at the top of a module, or an empty one where this version has none."""
        module = self._module(module_name)
        value = self._eval(ast.Name(name), _Scope(module, {})) if module else _UNKNOWN
        return value if isinstance(value, dict) else {}

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            base = self._root.joinpath(*name.split(".")[1:])
            file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
            inside = name.split(".")[0] == self._root.name
            self._modules[name] = _Module(name, file) if file and inside else None
        return self._modules[name]

    def _resolve(self, module: _Module, name: str) -> tuple[_Module, ast.AST] | None:
        if name in module.names:
            return module, module.names[name]
        sources = [module.imports[name]] if name in module.imports else [(star, name) for star in module.stars]
        for source, original in sources:
            other = self._module(source)
            found = self._resolve(other, original) if other and other is not module else None
            if found:
                return found
        return None

    # Statements

    def _run(self, body: list[ast.stmt], scope: _Scope) -> Any:
        """Both branches of every condition run; the result is the first returned value that is known."""
        result = _UNKNOWN
        for node in body:
            returned = self._statement(node, scope)
            result = returned if result is _UNKNOWN else result
        return result

    def _statement(self, node: ast.stmt, scope: _Scope) -> Any:
        if isinstance(node, ast.Return) and node.value is not None:
            return self._eval(node.value, scope)
        if isinstance(node, ast.Assign):
            self._assign(node, scope)
        elif isinstance(node, ast.ImportFrom):
            scope.module.add_import(node)
        elif isinstance(node, ast.For):
            self._loop(node, scope)
            return self._run(node.body, scope)
        else:
            for expression in (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)):
                self._eval(expression, scope)
            bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            bodies += [handler.body for handler in getattr(node, "handlers", [])]
            is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
            results = [self._run(body, scope) for body in bodies if not is_definition]
            return next((r for r in results if r is not _UNKNOWN), _UNKNOWN)
        return _UNKNOWN

    def _assign(self, node: ast.Assign, scope: _Scope) -> None:
        value = self._eval(node.value, scope)
        for target in node.targets:
            name = ast.unparse(target)
            before = scope.variables.get(name)
            if isinstance(before, Key) and isinstance(value, Key) and value not in before.keys.values():
                before.keys.update(value.keys)  # one variable for two blocks (bf16, bfloat16): they have the same keys
                value.keys = before.keys
            if value is not _UNKNOWN and (isinstance(value, Key) or not isinstance(before, Key)):
                scope.variables[name] = value

    def _loop(self, node: ast.For, scope: _Scope) -> None:
        """`for k, v in settings.items(): defaults[k] = v`: the keys of `defaults` count, or any where it has none."""
        block = self._eval(node.iter, scope)
        if not isinstance(block, Key):
            return
        for inner in node.body:
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Subscript):
                defaults = self._eval(inner.targets[0].value, scope)
                names = defaults if isinstance(defaults, dict) else {}
                block.is_open = block.is_open or not names
                for name, default in names.items():
                    block.child(name).note_default(default)

    # Expressions

    def _eval(self, node: ast.AST, scope: _Scope) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._lookup(node, scope)
        if isinstance(node, ast.Subscript):
            base, name = self._eval(node.value, scope), self._eval(node.slice, scope)
            return base.child(name) if isinstance(base, Key) and isinstance(name, str) else _UNKNOWN
        if isinstance(node, ast.Call):
            return self._evaluate_call(node, scope)
        if isinstance(node, ast.Compare):
            self._membership(node, scope)
            return _UNKNOWN
        if isinstance(node, ast.DictComp):
            return self._comprehension(node, scope)
        values = [self._eval(child, scope) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, ast.IfExp):
            return next((v for v in values if isinstance(v, Key)), _UNKNOWN)
        return self._literal(node, scope)

    def _literal(self, node: ast.AST, scope: _Scope) -> Any:
        if isinstance(node, ast.Dict):
            keys = [self._eval(k, scope) if k else _UNKNOWN for k in node.keys]
            values = [self._eval(v, scope) for v in node.values]
            return {k: v for k, v in zip(keys, values, strict=True) if isinstance(k, str)}
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._eval(element, scope) for element in node.elts]
        if isinstance(node, ast.JoinedStr):
            parts = [self._eval(p.value if isinstance(p, ast.FormattedValue) else p, scope) for p in node.values]
            return "".join(str(part) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._eval(node.operand, scope)
            return -value if isinstance(value, (int, float)) else _UNKNOWN
        if isinstance(node, ast.BinOp):  # of sizes such as 64 * (1024**2), only the type matters
            value = self._eval(node.left, scope)
            return value if isinstance(value, (int, float)) else _UNKNOWN
        return _UNKNOWN

    def _lookup(self, node: ast.Name | ast.Attribute, scope: _Scope) -> Any:
        name = ast.unparse(node)
        if name in scope.variables:
            return scope.variables[name]
        found = self._resolve(scope.module, name.partition(".")[0])
        if found is None:
            return _UNKNOWN
        module, target = found
        if isinstance(node, ast.Attribute):
            members = self._members(target) if isinstance(target, ast.ClassDef) else {}
            member = members.get(node.attr)
            return self._eval(member, _Scope(module, {})) if member is not None else _UNKNOWN
        return self._eval(target, _Scope(module, {})) if isinstance(target, ast.expr) else _UNKNOWN

    def _membership(self, node: ast.Compare, scope: _Scope) -> None:
        left, right = self._eval(node.left, scope), self._eval(node.comparators[0], scope)
        if isinstance(node.ops[0], (ast.In, ast.NotIn)) and isinstance(right, Key) and isinstance(left, str):
            right.child(left)

    def _comprehension(self, node: ast.DictComp, scope: _Scope) -> Any:
        """`{key: settings.get(key, {}) for key in (...)}` is a part of `settings`."""
        generator = node.generators[0]
        names, variable = self._eval(generator.iter, scope), ast.unparse(generator.target)
        for name in names if isinstance(names, list) else []:
            self._eval(node.value, _Scope(scope.module, {**scope.variables, variable: name}))
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            return self._eval(call.func.value, scope)
        return _UNKNOWN

    def _evaluate_call(self, node: ast.Call, scope: _Scope) -> Any:
        arguments = [self._eval(argument, scope) for argument in node.args]
        keywords = {keyword.arg: self._eval(keyword.value, scope) for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute):
            return self._method(node.func, arguments, keywords, scope)
        if not isinstance(node.func, ast.Name) or not _holds_key([*arguments, *keywords.values()]):
            return arguments[0] if isinstance(node.func, ast.Name) and node.func.id == "pp_int" else _UNKNOWN
        found = self._resolve(scope.module, node.func.id)
        if found and isinstance(found[1], ast.FunctionDef):
            return self._invoke(found[0], found[1], arguments, keywords)
        if found and isinstance(found[1], ast.ClassDef):
            self._construct(found[0], found[1], arguments, keywords)
        return _UNKNOWN

    def _method(self, func: ast.Attribute, arguments: list[Any], keywords: dict[str | None, Any], scope: _Scope) -> Any:
        if isinstance(func.value, ast.Name) and func.value.id == "self" and scope.owner is not None:
            method = next((m for m in scope.owner.body if isinstance(m, ast.FunctionDef) and m.name == func.attr), None)
            attributes = {name: value for name, value in scope.variables.items() if name.startswith("self.")}
            if method is None:
                return _UNKNOWN
            return self._invoke(scope.module, method, [_UNKNOWN, *arguments], keywords, attributes, scope.owner)
        base = self._eval(func.value, scope)
        if isinstance(base, Key) and func.attr == "get" and arguments and isinstance(arguments[0], str):
            key = base.child(arguments[0])
            key.note_default(arguments[1] if len(arguments) > 1 else _UNKNOWN)
            return key
        if isinstance(base, Key) and func.attr in {"keys", "items", "copy"}:
            return base
        return arguments[0] if func.attr in {"copy", "deepcopy"} and arguments else _UNKNOWN

    def _invoke(
        self, module: _Module, function: ast.FunctionDef, arguments: list[Any], keywords: dict[str | None, Any],
        attributes: dict[str, Any] | None = None, owner: ast.ClassDef | None = None,
    ) -> Any:  # fmt: skip
        call = (module.name, function.name, *(str(id(a)) for a in arguments))
        if call in self._active:
            return _UNKNOWN
        names = [argument.arg for argument in function.args.args]
        defaults = [self._eval(default, _Scope(module, {})) for default in function.args.defaults]
        values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        values |= dict(zip(names, arguments, strict=False)) | {n: v for n, v in keywords.items() if n}
        self._active.append(call)
        result = self._run(function.body, _Scope(module, {**(attributes or {}), **values}, owner))
        self._active.pop()
        return result

    # Classes

    def _construct(
        self, module: _Module, cls: ast.ClassDef, arguments: list[Any], keywords: dict[str | None, Any]
    ) -> None:
        unpacked = keywords.get(None)
        if isinstance(unpacked, Key):
            self._model(module, cls, unpacked)
        init = next((m for m in cls.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
        if init is not None and not isinstance(unpacked, Key):
            self._invoke(module, init, [_UNKNOWN, *arguments], keywords, {}, cls)

    def _model(self, module: _Module, cls: ast.ClassDef, block: Key) -> None:
        """Add the fields of a pydantic class, those of its bases included."""
        for base in cls.bases:
            found = self._resolve(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                self._model(found[0], found[1], block)
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                key = block.child(node.target.id)
                self._annotate(node.annotation, _Scope(module, {}), key)
                self._field(node.value, _Scope(module, {}), key, block)

    def _field(self, value: ast.expr | None, scope: _Scope, key: Key, block: Key) -> None:
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
            default = self._eval(value, scope) if value is not None else _UNKNOWN
            key.takes_auto = key.takes_auto or default == "auto"
            return
        options = {keyword.arg: self._eval(keyword.value, scope) for keyword in value.keywords}
        limits = ((name, limit) for name, limit in options.items() if isinstance(limit, (int, float)))
        key.bounds = tuple((_BOUNDS[str(name)], limit) for name, limit in limits if name in _BOUNDS)
        if isinstance(options.get("alias"), str):
            block.keys[str(options["alias"])] = key

    def _annotate(self, annotation: ast.AST, scope: _Scope, key: Key) -> None:
        """Learn types, choices and nested keys from a field's annotation."""
        head, inner = annotation, None
        if isinstance(annotation, ast.Subscript):
            head, inner = annotation.value, annotation.slice
        name = ast.unparse(head)
        if name == "Optional" and inner is not None:
            key.nullable = True
            self._annotate(inner, scope, key)
        elif name == "Union" and isinstance(inner, ast.Tuple):
            for element in inner.elts:
                self._annotate(element, scope, key)
        elif name == "Literal" and inner is not None:
            choices = self._eval(inner, scope)
            key.choices = tuple(choices) if isinstance(choices, list) else (choices,)
        elif name in _SCALARS:
            key.types.update(_SCALARS[name])
        elif (found := self._resolve(scope.module, name)) is not None:
            self._annotate_class(found[0], found[1], key)

    def _annotate_class(self, module: _Module, target: ast.AST, key: Key) -> None:
        if not isinstance(target, ast.ClassDef):
            self._annotate(target, _Scope(module, {}), key)
        elif any(ast.unparse(base) == "Enum" for base in target.bases):
            values = [self._eval(value, _Scope(module, {})) for value in self._members(target).values()]
            key.choices = tuple(dict.fromkeys(values))
        else:
            self._model(module, target, key)

    @staticmethod
    def _members(cls: ast.ClassDef) -> dict[str, ast.expr]:
        return {
            node.targets[0].id: node.value
            for node in cls.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }


def _holds_key(values: list[Any]) -> bool:
    return any(isinstance(value, Key) for value in values)
