"""State dicts: contexts and types of FSDP1 become calls of torch's `distributed.checkpoint.state_dict`."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from ..verdict import EQUIVALENT, UNSUPPORTED
from .arguments import TOLD, row
from .edits import Blocked
from .flow import DDP, FSDP1
from .program import Program
from .project import File
from .ranks import Guard
from .wrapping import _target

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
_SETTINGS = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")
# What may be done with the model in a context without that the type matters.
_HARMLESS = {"parameters", "named_parameters", "modules", "named_modules", "eval", "train", "to"}
_EFFECTS = (ast.Call, ast.NamedExpr, ast.Await)


class StateType(NamedTuple):
    """`on_rank0`: rank 0 alone has it, on the CPU. `written`: the program says so, it is not the default."""

    name: str
    on_rank0: bool = False
    written: bool = True


class States:
    """Decides about the state dicts of one program. All methods raise `Blocked` for what is not rewritten."""

    OPTIMIZER = ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")

    def __init__(self, program: Program) -> None:
        self.program = program

    def is_method(self, file: File, call: Any, method: str) -> bool:
        """Whether it calls FSDP1's method, of the class or of a wrapped model."""
        if not isinstance(call, ast.Call):
            return False
        if path := self.program.path(file, call.func):
            return path == f"FullyShardedDataParallel.{method}"
        func = call.func
        of_model = isinstance(func, ast.Attribute) and func.attr == method
        return of_model and FSDP1 in self.program.flow.kinds(file, func.value)  # type: ignore[attr-defined]

    # ---- contexts --------------------------------------------------------------------------------------------------

    def context(self, file: File, block: ast.With, item: ast.withitem) -> None:
        """`with FSDP.state_dict_type(model, type, ...):` goes away; the calls inside say what they want. It stays if
        the model goes anywhere else inside."""
        call: Any = item.context_expr
        found = self._type(file, call)
        if item.optional_vars is not None:
            raise Blocked(call, "state_as")
        model, uses = file.code(self._settings(file, call)["module"]), 0
        for node in [each for statement in block.body for each in ast.walk(statement)]:
            if (
                isinstance(node, (ast.Name, ast.Attribute))
                and isinstance(node.ctx, ast.Load)
                and file.code(node) == model
            ):
                uses += self._use(file, node)
        if not uses:
            raise Blocked(call, "state_elsewhere")
        self.program.edits[file].open(block, item)
        self._say_type(file, call, found, "state_dict_type")

    def _say_type(self, file: File, call: ast.Call, found: StateType, key: str) -> None:
        self.program.edits[file].say(call, row("calls", f"state_dict_type({found.name})"), found.name, key=key)

    def _use(self, file: File, node: Any) -> bool:
        """Whether the context matters for this use of its model."""
        parent: Any = file.parents[node]
        while isinstance(parent, ast.Attribute) and parent.attr == "module":
            parent = file.parents[parent]
        call = file.parents[parent]
        if isinstance(parent, ast.Attribute):
            if not isinstance(call, ast.Call) or call.func is not parent or parent.attr in _HARMLESS:
                return False
            if parent.attr == "state_dict":
                self.model_state(file, call, parent.value, FSDP1)
            if parent.attr in ("state_dict", "load_state_dict"):
                return True
        call = call if isinstance(parent, ast.keyword) else parent
        if isinstance(call, ast.Call):
            method = self.program.path(file, call.func).rpartition(".")[2]
            if method in (*self.OPTIMIZER, "optim_state_dict_to_load"):
                return True
            if self.program.dotted(file, call.func) in ("builtins.isinstance", "builtins.hasattr"):
                return False
        raise Blocked(node, "state_passed")

    def statement(self, file: File, call: ast.Call) -> None:
        """`FSDP.set_state_dict_type(model, type, ...)` goes away."""
        found, line = self._type(file, call), file.statement(call)
        if not isinstance(line, ast.Expr) or line.value is not call or not file.is_alone(line):
            raise Blocked(call, "state_returned")
        self.program.edits[file].remove(line)
        self._say_type(file, call, found, "set_state_dict_type")

    def _settings(self, file: File, call: ast.Call) -> dict[str, ast.expr]:
        func = call.func
        of_class = bool(self.program.path(file, func)) or not isinstance(func, ast.Attribute)
        given = self.program.named(call, _SETTINGS if of_class or len(call.args) > 1 else _SETTINGS[1:])
        if not of_class:
            given.setdefault("module", func.value)  # type: ignore[attr-defined]
        if "module" not in given:
            raise Blocked(call, "no_model")
        return given

    def _type(self, file: File, call: ast.Call) -> StateType:
        given = self._settings(file, call)
        kinds = self.program.values(file, given["state_dict_type"]) if "state_dict_type" in given else []
        found = {self.program.path(owner, value).rpartition(".")[2] for owner, value in kinds}
        if len(found) != 1 or not found <= {FULL, SHARDED, LOCAL}:
            raise Blocked(call, "unknown", "the type of state dicts")
        (name,) = found
        if name == LOCAL:
            raise Blocked(call, "flat")
        if "optim_state_dict_config" in given:
            self.program.edits[file].drop(given["optim_state_dict_config"])
        config = given.get("state_dict_config")
        return StateType(name, config is not None and self._on_rank0(file, config))

    def _on_rank0(self, file: File, config: ast.expr) -> bool:
        edits, made = self.program.edits[file], self.program.values(file, config)
        owner, call = made[0]
        edits.drop(config)
        if len(made) != 1 or not isinstance(call, ast.Call):
            raise Blocked(config, "unknown", file.code(config))
        given = self.program.named(call, ("offload_to_cpu", "rank0_only"))
        texts = {name: owner.code(value) for name, value in given.items()}
        if not set(texts.values()) <= {"True", "False"}:
            raise Blocked(config, "unknown", owner.code(call))
        offload, rank0 = texts.get("offload_to_cpu") == "True", texts.get("rank0_only") == "True"
        if offload != rank0 and self.program.path(owner, call.func).startswith("Full"):
            has = "on the CPU of every rank" if offload else "on the device of rank 0"
            reason = f"{has} before, on the device of every rank now"
            edits.tell(config, "FullStateDictConfig", EQUIVALENT, reason)
        return offload and rank0

    def _type_at(self, file: File, node: ast.AST) -> StateType:
        """The type that holds at this call."""
        for around in file.around(node):
            for item in around.items if isinstance(around, ast.With) else ():
                if self.is_method(file, item.context_expr, "state_dict_type"):
                    return self._type(file, item.context_expr)  # type: ignore[arg-type]
        files = self.program.files
        found = [(f, n) for f in files for n in f.nodes if self.is_method(f, n, "set_state_dict_type")]
        if len(found) > 1:
            raise Blocked(node, "state_twice")
        for owner, call in found:
            if owner.scope(call) is not file.scope(node) or file.span(node)[0] > file.span(call)[0]:
                return self._type(owner, call)
        return StateType(FULL, written=False)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def model_state(self, file: File, call: ast.Call, model: ast.expr, kind: str) -> None:
        """`model.state_dict()` of a model that FSDP1 or DDP wraps."""
        edits = self.program.edits[file]
        if call.func in edits.gone:
            return
        if call.args or call.keywords:
            raise Blocked(call, "state_arguments")
        found = self._type_at(file, call) if kind == FSDP1 else StateType(FULL, written=False)
        if found.name == SHARDED:
            edits.gone.add(call.func)
        elif kind == DDP and (guard := self.program.ranks.guard(file, call)) is not None:
            self._gathered_before(file, call, model, guard)
        else:
            edits.replace(call, *self._gathered(file, model, found))
            edits.drop(call.func)
            if not found.written:
                value = "FULL_STATE_DICT" if kind == FSDP1 else "names with the prefix module."
                edits.say(
                    call, row("calls", "model.state_dict() without a type"), value, default=True, key="state_dict()"
                )

    def _gathered(self, file: File, model: ast.expr, found: StateType) -> tuple[Any, ...]:
        function = self.program.edits[file].use("get_model_state_dict", _STATE_DICT)
        return f"{function}(", model, f", options={self._options(file, found)})"

    def _gathered_before(self, file: File, call: ast.Call, model: ast.expr, guard: Guard) -> None:
        """`if rank == 0: save(model.state_dict())`: all ranks gather before it, one writes."""
        edits, others = self.program.edits[file], self._other_conditions(file, guard, call)
        if others is None:
            edits.tell(call, "state_dict()", UNSUPPORTED, TOLD["state_some_ranks"].format(guard))
            return
        name = edits.fresh("model_state", "full_model_state", "gathered_state")
        gather = (f"{name} = ", *self._gathered(file, model, StateType(FULL, True)))
        if others:
            tests = [part for each in others for part in (" and (", each, ")")]
            tests = [others[0]] if len(others) == 1 else [str(tests[0]).removeprefix(" and "), *tests[1:]]
            gather = ("if ", *tests, ":\n    ", *gather)
        edits.before(guard.node, *gather)
        edits.replace(call, name)
        edits.drop(call.func)
        edits.say(call, row("calls", "state_dict() of DDP on one rank"), key="state_dict()")

    def _other_conditions(self, file: File, guard: Guard, call: ast.Call) -> list[ast.expr] | None:
        """Returns what else than the rank the `if` around asks for; None if lines before it may do something else."""
        block, inner = guard.node, file.statement(call)
        if not guard.own or inner not in block.body or file.code(block).startswith("elif"):
            return None
        if self.program.ranks.guard(file, block) is not None or not file.is_first(block):
            return None
        for each in [n for s in block.body[: block.body.index(inner)] for n in ast.walk(s) if isinstance(n, ast.Call)]:
            if self.program.flow.wrapped(file, each.func) or getattr(each.func, "attr", "") in (
                "step",
                "load_state_dict",
            ):
                return None  # the model is another one before it
        parts = block.test.values if isinstance(block.test, ast.BoolOp) else [block.test]
        if isinstance(block.test, ast.BoolOp) and not isinstance(block.test.op, ast.And):
            return None
        rest = [each for each in parts if not self.program.ranks.asks(file, each)]
        return None if any(isinstance(n, _EFFECTS) for each in rest for n in ast.walk(each)) else rest

    def optimizer_state(self, file: File, call: ast.Call, method: str) -> None:
        """`FSDP.optim_state_dict(model, optimizer)` and its older forms."""
        given = self.program.named(call, ("model", "optim"))
        if set(given) != {"model", "optim"}:
            raise Blocked(call, "optimizer_arguments")
        older = {"full_optim_state_dict": StateType(FULL, True), "sharded_optim_state_dict": StateType(SHARDED)}
        found = older.get(method) or self._type_at(file, call)
        options = f", options={self._options(file, found)}" if found.name == FULL else ""
        edits = self.program.edits[file]
        function = edits.use("get_optimizer_state_dict", _STATE_DICT)
        edits.replace(call, f"{function}(", given["model"], ", ", given["optim"], f"{options})")
        edits.drop(call.func)
        edits.say(call, row("calls", "optim_state_dict()"), key=method)

    def loaded_state(self, file: File, call: ast.Call) -> None:
        """`FSDP.optim_state_dict_to_load(model, optimizer, state)`, and the `load_state_dict` that takes it."""
        given = self.program.named(call, ("model", "optim", "optim_state_dict"))
        if set(given) != {"model", "optim", "optim_state_dict"}:
            raise Blocked(call, "optimizer_arguments")
        full, edits = self._type_at(file, call).name == FULL, self.program.edits[file]
        options = f", options={self._options(file, StateType(FULL))}" if full else ""
        function = edits.use("set_optimizer_state_dict", _STATE_DICT)
        state, parent = given["optim_state_dict"], file.parents[call]
        target = _target(file.statement(call), call)
        uses = file.loads(target) if isinstance(target, ast.Name) else []
        loads: list[Any] = [file.parents[use] for use in uses if file.span(use)[0] > file.span(call)[0]]
        if not target:
            loads = [parent]
        else:
            edits.replace(call, state)
        if not loads or not all(_is_load(each) for each in loads):
            raise Blocked(call, "optimizer_load")
        for load in loads:
            text = state if load is parent else load.args[0]
            edits.replace(load, f"{function}(", given["model"], ", ", given["optim"], ", ", text, f"{options})")
        edits.drop(call.func)
        edits.say(call, row("calls", "optim_state_dict_to_load()"))

    def _options(self, file: File, found: StateType) -> str:
        offload = ", cpu_offload=True" if found.on_rank0 else ""
        return f"{self.program.edits[file].use('StateDictOptions', _STATE_DICT)}(full_state_dict=True{offload})"


def _is_load(node: Any) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and node.func.attr == "load_state_dict" and len(node.args) == 1
