"""State dicts: contexts and types of FSDP1 become calls of torch's `distributed.checkpoint.state_dict`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from ..verdict import EQUIVALENT
from .arguments import row
from .flow import FSDP1, Flow
from .plan import NewCall, Part, Plan
from .wrapping import ManualChange, Wrappings

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
# What a condition asks that holds on some ranks only.
_OF_A_RANK = re.compile(r"rank|is_(local_|world_)?(main|master|zero)|main_process", re.IGNORECASE)


@dataclass(frozen=True)
class StateType:
    """`on_rank0`: rank 0 alone has it, on the CPU. `written`: the program says so, it is not the default."""

    name: str
    on_rank0: bool
    written: bool


class States:
    """Decides about the state dicts of one file."""

    def __init__(self, flow: Flow, plan: Plan, wrappings: Wrappings) -> None:
        self.flow, self.plan, self.wrappings, self.file = flow, plan, wrappings, plan.file

    # ---- contexts ------------------------------------------------------------------------------------------------

    def context(self, item: cst.WithItem, block: cst.With) -> None:
        """`with FSDP.state_dict_type(model, type, ...):` goes away; the calls inside say what they want. Raises
        `ManualChange`."""
        call = item.item
        assert isinstance(call, cst.Call)
        if item.asname is not None:
            raise ManualChange("the settings that state_dict_type gives have no counterpart")
        found = self._type(call)
        if found.name == LOCAL:
            raise ManualChange(row("calls", "state_dict_type(LOCAL_STATE_DICT)").reason)
        if not self._uses(block):
            raise ManualChange("its state dicts are made in other functions; move state_dict_type there")
        self.plan.removed.add(item)
        self.plan.say(call, row("calls", f"state_dict_type({found.name})"), key="state_dict_type", value=found.name)

    def statement(self, call: cst.Call) -> None:
        """`FSDP.set_state_dict_type(model, type, ...)` goes away. Raises `ManualChange`."""
        found = self._type(call)
        if found.name == LOCAL:
            raise ManualChange(row("calls", "state_dict_type(LOCAL_STATE_DICT)").reason)
        line = self.file.above(call, cst.SimpleStatementLine)
        if (
            not isinstance(line, cst.SimpleStatementLine)
            or len(line.body) != 1
            or not isinstance(line.body[0], cst.Expr)
        ):
            raise ManualChange("what set_state_dict_type returns has no counterpart")
        self.plan.removed.add(line)
        self.plan.say(call, row("calls", f"state_dict_type({found.name})"), key="set_state_dict_type", value=found.name)

    def _uses(self, block: cst.CSTNode) -> bool:
        names = ("state_dict", "load_state_dict", "optim_state_dict", "optim_state_dict_to_load")
        left = [block]
        while left:
            node = left.pop()
            if isinstance(node, cst.Attribute) and node.attr.value in names:
                return True
            left.extend(node.children)
        return False

    def _type(self, call: cst.Call, *, written: bool = True) -> StateType:
        given = dict(
            self.wrappings.arguments(
                call, ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")
            )
        )
        node = given.get("state_dict_type")
        name = "" if node is None else self.wrappings.constant(node).rpartition(".")[2]
        if name not in (FULL, SHARDED, LOCAL):
            raise ManualChange(
                "the type is not known before it runs; write StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT"
            )
        return StateType(name, self._on_rank0(given.get("state_dict_config")), written)

    def _on_rank0(self, config: cst.BaseExpression | None) -> bool:
        if config is None:
            return False
        made = self.wrappings.value_of(config)
        if isinstance(config, cst.Name):
            self.plan.handled.add(config)
        if not isinstance(made, cst.Call):
            return False
        given = {
            name: self.wrappings.text(value)
            for name, value in self.wrappings.arguments(made, ("offload_to_cpu", "rank0_only"))
        }
        offload, rank0 = given.get("offload_to_cpu") == "True", given.get("rank0_only") == "True"
        if offload != rank0:
            has = "on the CPU of every rank" if offload else "on the device of rank 0"
            self.plan.say_verdict(
                config, "FullStateDictConfig", EQUIVALENT, f"{has} before, on the device of every rank now"
            )
        return offload and rank0

    def type_at(self, node: cst.CSTNode) -> StateType:
        """The type that holds at this call. Raises `ManualChange`."""
        around = self.file.above(node, cst.With)
        while isinstance(around, cst.With):
            for item in around.items:
                if isinstance(item.item, cst.Call) and self.is_method(item.item, "state_dict_type"):
                    return self._type(item.item)
            around = self.file.above(around, cst.With)
        for file in self.flow.project.files:
            for other in file.walk():
                if file is self.file and isinstance(other, cst.Call) and self.is_method(other, "set_state_dict_type"):
                    return self._type(other)
        return StateType(FULL, False, False)

    def is_method(self, call: cst.Call, method: str) -> bool:
        """Whether it calls FSDP1's method, of the class or of a wrapped model."""
        name = self.flow.project.resolve(self.file, call.func)
        if name is not None and name.kind == "fsdp":
            return name.path == f"FullyShardedDataParallel.{method}"
        func = call.func
        return (
            isinstance(func, cst.Attribute)
            and func.attr.value == method
            and self.flow.kind(self.file, func.value) == FSDP1
        )

    # ---- calls ---------------------------------------------------------------------------------------------------

    def model_state(self, call: cst.Call, model: cst.BaseExpression, kind: str) -> None:
        """`model.state_dict()` of a model that FSDP1 or DDP wraps."""
        if call.args:
            raise ManualChange("expected state_dict() without arguments")
        found = self.type_at(call) if kind == FSDP1 else StateType(FULL, False, False)
        if found.name == SHARDED:
            return
        if kind != FSDP1 and (condition := self._of_a_rank(call)):
            raise ManualChange(
                f"all ranks have to make a full state dict, found `{condition}` around it: call "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) before that"
            )
        parts = (Part("", model), Part("options", self._options(found)))
        self.plan.calls[call] = NewCall(self.plan.use("get_model_state_dict", _STATE_DICT), parts)
        if not found.written:
            self.plan.say(
                call,
                row("calls", "model.state_dict() without a type"),
                "FULL_STATE_DICT" if kind == FSDP1 else "names with the prefix module.",
                default=True,
                key="state_dict()",
            )

    def _of_a_rank(self, node: cst.CSTNode) -> str:
        """The condition around `node` that asks for the rank, "" for none. DDP's own state dict needs no messages, so
        programs make it on rank 0 alone."""
        around = self.file.above(node, cst.If, cst.IfExp)
        while isinstance(around, cst.If | cst.IfExp):
            text = self.wrappings.text(around.test)
            if _OF_A_RANK.search(text):
                return text
            around = self.file.above(around, cst.If, cst.IfExp)
        return ""

    def optimizer_state(self, call: cst.Call, method: str) -> None:
        """`FSDP.optim_state_dict(model, optimizer)` and its older forms."""
        given = dict(self.wrappings.arguments(call, ("model", "optim")))
        if not {"model", "optim"} <= given.keys():
            raise ManualChange("expected a model and an optimizer")
        found = self.type_at(call)
        if method == "full_optim_state_dict":
            found = StateType(FULL, True, True)
        elif method == "sharded_optim_state_dict":
            found = StateType(SHARDED, False, True)
        parts = [Part("", given["model"]), Part("", given["optim"])]
        if found.name == FULL:
            parts.append(Part("options", self._options(found)))
        self.plan.calls[call] = NewCall(self.plan.use("get_optimizer_state_dict", _STATE_DICT), tuple(parts))
        self.plan.say(call, row("calls", "optim_state_dict()"), key=method)

    def loaded_state(self, call: cst.Call) -> None:
        """`FSDP.optim_state_dict_to_load(model, optimizer, state)`, and the `load_state_dict` that takes it."""
        given = dict(self.wrappings.arguments(call, ("model", "optim", "optim_state_dict")))
        if not {"model", "optim", "optim_state_dict"} <= given.keys():
            raise ManualChange("expected a model, an optimizer and its state")
        full = self.type_at(call).name == FULL
        loads = self._loads(call)
        if not loads:
            raise ManualChange(
                "found no optimizer.load_state_dict of its result beside it; use set_optimizer_state_dict"
            )
        for load in loads:
            state = given["optim_state_dict"] if load.args[0].value is call else load.args[0].value
            parts = [Part("", given["model"]), Part("", given["optim"]), Part("", state)]
            if full:
                parts.append(Part("options", f"{self.plan.use('StateDictOptions', _STATE_DICT)}(full_state_dict=True)"))
            self.plan.calls[load] = NewCall(self.plan.use("set_optimizer_state_dict", _STATE_DICT), tuple(parts))
        self.plan.texts[call] = given["optim_state_dict"]
        self.plan.say(call, row("calls", "optim_state_dict_to_load()"))

    def _loads(self, call: cst.Call) -> list[cst.Call]:
        """The calls of `load_state_dict` that take what `call` gives."""
        found: list[cst.Call] = []
        parent = self.file.parents[call]
        outer = self.file.parents.get(parent) if isinstance(parent, cst.Arg) else None
        if isinstance(outer, cst.Call) and _method(outer) == "load_state_dict":
            return [outer]
        if isinstance(parent, cst.Assign) and isinstance(target := parent.targets[0].target, cst.Name):
            key = self.flow.key(self.file, target)
            for node in self.file.walk():
                if isinstance(node, cst.Call) and _method(node) == "load_state_dict" and node.args:
                    if key is not None and self.flow.key(self.file, node.args[0].value) == key:
                        found.append(node)
        return found

    def _options(self, found: StateType) -> str:
        offload = ", cpu_offload=True" if found.on_rank0 else ""
        return f"{self.plan.use('StateDictOptions', _STATE_DICT)}(full_state_dict=True{offload})"


def _method(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
