"""Looks at every use of FSDP1, DDP and torch's FSDP2 in one file and decides what it becomes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment

from ..verdict import EXACT
from .arguments import FSDP2_NAMES, row
from .flow import DDP, FSDP1, Flow
from .plan import NewCall, Of, Part, Plan, Wrapping
from .project import File, Name, Project
from .states import States
from .wrapping import ManualChange, Wrappings, manual_change, new_offload, new_precision

_CLASS = "FullyShardedDataParallel"
_OPTIMIZER_STATES = ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")


def decide(project: Project, flow: Flow, file: File) -> Plan:
    """All changes of one file."""
    return Calls(project, flow, file).decide()


class Calls:
    """The decisions of one file, in the order of its source."""

    def __init__(self, project: Project, flow: Flow, file: File) -> None:
        self.project, self.flow, self.file = project, flow, file
        self.plan = Plan(file)
        self.wrappings = Wrappings(project, self.plan)
        self.states = States(flow, self.plan, self.wrappings)

    def decide(self) -> Plan:
        for node in self.file.walk():
            if isinstance(node, cst.Call):
                self._call(node)
            elif isinstance(node, cst.With):
                self._with(node)
            elif isinstance(node, cst.ClassDef):
                self._class(node)
            elif isinstance(node, cst.Attribute):
                self._attribute(node)
        for node in self.file.walk():
            if isinstance(node, (cst.Name, cst.Attribute)):
                self._name(node)
        self.wrappings.say_what_is_lost()
        self._drop_variables()
        self._drop_imports()
        return self.plan

    def _try(self, node: cst.CSTNode, key: str, decision: Callable[[], object]) -> bool:
        """Decide; where that the user has to decide, leave everything as it is and say so."""
        plan = self.plan
        before = {name: copy.copy(value) for name, value in vars(plan).items() if name != "file"}
        try:
            decision()
            return True
        except ManualChange as error:
            vars(plan).update(before)
            manual_change(plan, node, key, str(error))
            return False
        except KeyError as error:
            vars(plan).update(before)
            manual_change(plan, node, key, f"expected the argument {error.args[0]}")
            return False

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _call(self, call: cst.Call) -> None:
        if call in self.plan.handled or call in self.plan.calls:
            return
        name = self.project.resolve(self.file, call.func)
        if name is not None and name.kind == "fsdp":
            self._fsdp_call(call, name.path)
        elif name is not None and name.path == "DistributedDataParallel":
            self._try(call, name.path, lambda: self._wrap(call, DDP))
        elif name is not None and name.path == "functools.partial" and call.args:
            if self.flow.maker(self.file, call.args[0].value) == FSDP1:
                self._try(call, "partial", lambda: self._partial(call))
        elif name is not None and self.flow.makers.get(name) == FSDP1 and self._is_plain_subclass(name):
            self._try(call, _CLASS, lambda: self._wrap(call, FSDP1))
        elif isinstance(call.func, cst.Attribute):
            self._method(call, call.func)
        elif self.project.is_ambiguous(self.file, call.func):
            manual_change(
                self.plan, call, self.file.code(call.func), "this name may be torch's or another; import one of them"
            )

    def _fsdp_call(self, call: cst.Call, path: str) -> None:
        if path == _CLASS:
            self._try(call, path, lambda: self._wrap(call, FSDP1))
        elif path == "MixedPrecision":
            self._try(call, path, lambda: self._replace(call, new_precision(self.wrappings, call)))
        elif path == "CPUOffload":
            self._try(call, path, lambda: self._replace(call, new_offload(self.wrappings, call)))
        elif path == "ShardedGradScaler":
            self._try(call, path, lambda: self._scaler(call))
        elif path == "wrap.wrap" or path == "wrap":
            self._try(call, path, lambda: self._wrapped_inside(call))
        elif path.startswith(f"{_CLASS}."):
            self._class_method(call, path.partition(".")[2])

    def _replace(self, call: cst.Call, new: NewCall | str) -> None:
        if isinstance(new, str):
            self.plan.texts[call] = new
        else:
            self.plan.calls[call] = new
        self._handle(call.func)

    def _handle(self, node: cst.CSTNode) -> None:
        """This name is gone afterwards."""
        self.plan.handled.add(node)
        while isinstance(node, cst.Attribute):
            node = node.value
            self.plan.handled.add(node)

    def _wrap(self, call: cst.Call, kind: str) -> None:
        made = self.wrappings.fsdp1(call) if kind == FSDP1 else self.wrappings.ddp(call)
        self._place(made)
        self._rebind(made)
        function = self.plan.use(made.function)
        parts = (Part("", made.value), *made.options)
        self.plan.calls[call] = NewCall(function, parts)
        self._handle(call.func)
        kept = [part.source for part in parts]
        written = [source for source in kept if isinstance(source, str)] + made.before + made.after
        written += [made.units.condition] if made.units is not None else []
        for argument in call.args:
            if argument.value not in kept and not any(self.file.code(argument.value) in text for text in written):
                self._handle_all(argument.value)
        key = _CLASS if kind == FSDP1 else "DistributedDataParallel"
        old = f"{key}(model)"
        self.plan.say(call, row("calls", old), key=key)
        if made.at is not None:
            self.plan.wrappings[made.at] = made

    def _place(self, made: Wrapping) -> None:
        """Find the statement around a wrapped model, if lines go around it."""
        if not made.takes_lines:
            statement = self.file.above(made.old, cst.SimpleStatementLine)
            if made.subject is not None and _assigns(statement, made.old) == made.subject:
                made.at = statement
            return
        node: cst.CSTNode = made.old
        while not isinstance(node, cst.SimpleStatementLine):
            node = self.file.parents[node]
            if isinstance(node, (cst.IfExp, cst.Lambda, cst.BaseComp, cst.BooleanOperation)):
                raise ManualChange(
                    "it is wrapped inside an expression that need not run; write it as a statement of its own"
                )
            if isinstance(node, (cst.SimpleStatementSuite, cst.FunctionDef, cst.ClassDef, cst.Module)):
                raise ManualChange("it is wrapped where no line can go before it; write it as a statement of its own")
        if len(node.body) != 1 or node in self.plan.wrappings:
            raise ManualChange("several models are wrapped in one line; wrap each in a line of its own")
        target = _assigns(node, made.old)
        returned = isinstance(node.body[0], cst.Return) and node.body[0].value is made.old
        if made.subject is None and not target and not returned:
            raise ManualChange("the model has no name where it is wrapped; give it one before")
        if made.after and not (target or returned or made.subject is not None):
            raise ManualChange("the model is used in the line that wraps it; wrap it in a line of its own")
        made.at = node

    def _rebind(self, made: Wrapping) -> None:
        """An optimizer that was built before the model is wrapped continues with the sharded parameters."""
        if made.subject is None:
            return
        owner = self.file.above(made.old, cst.FunctionDef, cst.Module)
        for node in self.file.walk():
            if (
                not isinstance(node, (cst.Assign, cst.AnnAssign))
                or self.file.above(node, cst.FunctionDef, cst.Module) is not owner
            ):
                continue
            made_by = self.project.resolve(self.file, node.value.func) if isinstance(node.value, cst.Call) else None
            if made_by is None or not made_by.path.startswith("torch.optim.") or "lr_scheduler" in made_by.path:
                continue
            text = self.file.code(node)
            of_model = any(f"{made.subject}.{method}()" in text for method in ("parameters", "named_parameters"))
            if of_model and self.file.position(node) < self.file.position(made.old):
                optimizer = self.file.code(node.target if isinstance(node, cst.AnnAssign) else node.targets[0].target)
                had_lines = made.takes_lines
                made.after.append(f"{self.plan.use('rebind_optimizer')}({optimizer}, {{model}})")
                if not had_lines:
                    made.at = None
                    self._place(made)
                self.plan.say(node, row("calls", "optimizer built before the model is wrapped"), key="optimizer")

    def _partial(self, call: cst.Call) -> None:
        """`partial(FSDP, ...)`: the settings of every model that it wraps."""
        inner = call.with_changes(args=[cst.Arg(cst.Name("module")), *call.args[1:]])
        made = self.wrappings.fsdp1(inner)
        if made.takes_lines:
            raise ManualChange(
                "a partial of FullyShardedDataParallel with a policy: write a function that shards the units"
            )
        function = cst.Name(self.plan.use(made.function))
        self.plan.calls[call] = NewCall(self.file.code(call.func), (Part("", function), *made.options))
        self._handle(call.args[0].value)
        self.plan.say(call, row("calls", f"{_CLASS}(model)"), key=_CLASS)

    def _scaler(self, call: cst.Call) -> None:
        names = (
            "device",
            "init_scale",
            "backoff_factor",
            "growth_factor",
            "growth_interval",
            "enabled",
            "process_group",
        )
        given = dict(self.wrappings.arguments(call, names))
        given.pop("process_group", None)
        parts = tuple(Part(name if name != "device" else "", value) for name, value in given.items())
        self._replace(call, NewCall(self.plan.use("GradScaler"), parts))
        self.plan.say(call, row("calls", "ShardedGradScaler"))

    # ---- methods -------------------------------------------------------------------------------------------------

    def _method(self, call: cst.Call, func: cst.Attribute) -> None:
        kind, method, model = self.flow.kind(self.file, func.value), func.attr.value, func.value
        if kind in (FSDP1, DDP):
            if method == "no_sync":
                self._no_sync(call, model)
            elif method == "state_dict":
                self._try(call, method, lambda: self.states.model_state(call, model, kind))
            elif method in ("register_comm_hook", "join"):
                manual_change(self.plan, call, f"{method}()", row("calls", f"{method}()").reason)
            elif kind == FSDP1 and method == "clip_grad_norm_":
                self._clip(call, model, list(call.args))
            elif kind == FSDP1 and method in _CLASS_METHODS:
                self._class_method(call, method)
        elif method == "no_sync" and not call.args and not kind and self._may_be_wrapped(model):
            manual_change(self.plan, call, "no_sync()", f"whether {self.file.code(model)} is sharded was not found out")

    def _may_be_wrapped(self, node: cst.BaseExpression) -> bool:
        """Whether the program wraps models at all, and this is a variable of its own."""
        name = self.project.resolve(self.file, node)
        return bool(self.flow.kinds) and (name is None or (name.kind == "local" and name not in self.flow.functions))

    def _no_sync(self, call: cst.Call, model: cst.BaseExpression) -> None:
        taken = any(scope.assignments["no_sync"] for scope in set(self.file.scopes.values()))
        helper = "without_gradient_sync" if taken else "no_sync"
        self.plan.helpers.add(helper)
        self.plan.imports.add(("contextlib", ""))
        self.plan.calls[call] = NewCall(helper, (Part("", model),))
        self.plan.say(call, row("calls", "no_sync()"))

    def _clip(self, call: cst.Call, model: cst.BaseExpression, rest: list[cst.Arg]) -> None:
        parts = [Part("", Of(model, ".parameters()"))]
        parts += [Part(arg.keyword.value if arg.keyword is not None else "", arg.value) for arg in rest]
        self.plan.calls[call] = NewCall(self.plan.use("clip_grad_norm_"), tuple(parts))
        self._handle(call.func)
        self.plan.say(call, row("calls", "clip_grad_norm_()"))

    def _class_method(self, call: cst.Call, method: str) -> None:
        """FSDP1's methods through the class, or those that a model has as well and that take it."""
        if method == "clip_grad_norm_" and call.args:
            self._clip(call, call.args[0].value, list(call.args[1:]))
        elif method == "summon_full_params":
            self._try(call, f"{method}()", lambda: self._summon(call))
        elif method == "set_state_dict_type":
            self._try(call, method, lambda: self._state(call, lambda: self.states.statement(call)))
        elif method in _OPTIMIZER_STATES:
            self._try(call, method, lambda: self._state(call, lambda: self.states.optimizer_state(call, method)))
        elif method == "optim_state_dict_to_load":
            self._try(call, method, lambda: self._state(call, lambda: self.states.loaded_state(call)))
        elif method == "fsdp_modules" and len(call.args) == 1:
            module = self.plan.use("FSDPModule")
            text = (
                f"[module for module in {self.file.code(call.args[0].value)}.modules() if isinstance(module, {module})]"
            )
            self.plan.texts[call] = text
            self._handle(call.func)
            self.plan.say_verdict(call, "fsdp_modules()", EXACT, "sharded modules have this class")
        elif method == "state_dict_type":
            if not isinstance(self.file.parents.get(call), cst.WithItem):
                manual_change(self.plan, call, method, "expected it in a with statement")
        else:
            manual_change(self.plan, call, f"{_CLASS}.{method}", "there is no counterpart")

    def _state(self, call: cst.Call, decision: Callable[[], None]) -> None:
        decision()
        self._handle(call.func)

    def _summon(self, call: cst.Call) -> None:
        names = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
        given = dict(self.wrappings.arguments(call, names))
        if "module" not in given:
            raise ManualChange("expected the model as first argument")
        grads = given.pop("with_grads", None)
        if grads is not None and self.file.code(grads) != "False":
            raise ManualChange("gradients are not gathered with the parameters; take parameter.grad.full_tensor()")
        parts = [Part("" if name == "module" else name, value) for name, value in given.items()]
        if "writeback" not in given:
            parts.append(Part("writeback", "True"))
        self.plan.calls[call] = NewCall(self.plan.use("full_params"), tuple(parts))
        self._handle(call.func)
        default = "writeback" not in given
        self.plan.say(call, row("calls", "summon_full_params()"), "writeback=True" if default else "", default=default)

    # ---- blocks, classes, names ------------------------------------------------------------------------------------

    def _with(self, node: cst.With) -> None:
        for item in node.items:
            call = item.item
            if not isinstance(call, cst.Call):
                continue
            if self.states.is_method(call, "state_dict_type"):
                if self._try(call, "state_dict_type", lambda: self.states.context(item, node)):  # noqa: B023
                    self._handle(call.func)
                    for argument in call.args:
                        self._handle_all(argument.value)
            elif (name := self.project.resolve(self.file, call.func)) is not None and name.path == "enable_wrap":
                self._try(call, "enable_wrap", lambda: self._enable_wrap(item, node))  # noqa: B023

    def _handle_all(self, node: cst.CSTNode) -> None:
        self.plan.handled.add(node)
        for child in node.children:
            self._handle_all(child)

    def _enable_wrap(self, item: cst.WithItem, block: cst.With) -> None:
        """`with enable_wrap(wrapper_cls=FSDP, ...)`: each `wrap(module)` inside is a unit."""
        call = item.item
        assert isinstance(call, cst.Call)
        self._settings_of_wrap(call, cst.Name("module"))
        self.plan.removed.add(item)
        self.plan.say(call, row("calls", "enable_wrap(), wrap()"), key="enable_wrap")
        self._handle_all(call)

    def _settings_of_wrap(self, call: cst.Call, module: cst.BaseExpression) -> Wrapping:
        args = [a for a in call.args if a.keyword is None or a.keyword.value != "wrapper_cls"]
        wrapper = next((a.value for a in call.args if a.keyword is not None and a.keyword.value == "wrapper_cls"), None)
        if wrapper is None or self.flow.maker(self.file, wrapper) != FSDP1:
            raise ManualChange("expected wrapper_cls=FullyShardedDataParallel")
        made = self.wrappings.fsdp1(call.with_changes(args=[cst.Arg(module), *args]))
        if made.takes_lines:
            raise ManualChange("a policy or sync_module_states inside of enable_wrap; wrap the model by itself")
        return made

    def _wrapped_inside(self, call: cst.Call) -> None:
        around = self.file.above(call, cst.With)
        while isinstance(around, cst.With):
            for item in around.items:
                if item in self.plan.removed and isinstance(item.item, cst.Call):
                    findings = len(self.plan.findings)
                    made = self._settings_of_wrap(item.item, call.args[0].value)
                    del self.plan.findings[findings:]  # said where the settings are
                    parts = (Part("", call.args[0].value), *made.options)
                    self._replace(call, NewCall(self.plan.use(made.function), parts))
                    return
            around = self.file.above(around, cst.With)
        raise ManualChange(
            "found no enable_wrap around it in this function; shard the module where the settings are known"
        )

    def _class(self, node: cst.ClassDef) -> None:
        """A subclass of FSDP1 that only passes settings becomes a function."""
        if not any(self.flow.maker(self.file, base.value) == FSDP1 for base in node.bases):
            return
        self._try(node, f"class {node.name.value}", lambda: self._subclass(node))

    def _subclass(self, node: cst.ClassDef) -> None:
        call = _only_super_init(node)
        if call is None and not _is_bare(node):
            raise ManualChange(
                f"{node.name.value} derives from FullyShardedDataParallel; there is no class to derive from: move "
                f"its methods to the model, and shard that"
            )
        if call is None:
            self.plan.functions[node] = Wrapping(cst.Call(cst.Name("x")), "", cst.Name("x"), None)
        else:
            made = self.wrappings.fsdp1(call)
            if made.subject is None or made.after:
                raise ManualChange(
                    f"{node.name.value}.__init__ does more than passing settings; write a function that shards"
                )
            self.plan.functions[node] = made
            self.plan.handled.add(call)
        self.plan.use("fully_shard")
        self._handle(node.bases[0].value)
        self.plan.say(node, row("calls", "a subclass that only passes settings"), key=f"class {node.name.value}")

    def _is_plain_subclass(self, name: Name) -> bool:
        """A subclass without `__init__`: a call of it takes FSDP1's settings."""
        for file in self.project.files if name.kind == "local" else ():
            for node in file.walk() if file.module == name.module else ():
                if isinstance(node, cst.ClassDef) and node.name.value == name.path:
                    return _is_bare(node)
        return False

    def _attribute(self, node: cst.Attribute) -> None:
        if node.attr.value == "module" and self.flow.kind(self.file, node.value) in (FSDP1, DDP):
            self.plan.texts[node] = node.value
            self.plan.say(node, row("calls", "model.module"))

    def _name(self, node: cst.Name | cst.Attribute) -> None:
        """What is left: names of classes in tests of types, annotations, aliases, and FSDP2's names."""
        parent = self.file.parents.get(node)
        if node in self.plan.handled or isinstance(parent, (cst.AssignTarget, cst.ClassDef, cst.FunctionDef)):
            return
        if isinstance(parent, cst.Attribute) and self._is_part(node, parent):
            return
        if self.file.above(node, cst.Import, cst.ImportFrom) is not None:
            return
        name = self.project.resolve(self.file, node)
        if name is None or name.kind not in ("fsdp", "ddp"):
            if name is not None and self.flow.makers.get(name) == FSDP1 and self._is_type(node):
                self._reference(node, _CLASS)
            return
        if name.path in FSDP2_NAMES:
            if isinstance(node, cst.Attribute):
                self.plan.texts[node] = self.plan.use(name.path)
                self._handle(node)
            if name.path == "fully_shard":
                self.plan.say(node, row("calls", "torch.distributed.fsdp.fully_shard"), key="fully_shard")
        elif name.path in (_CLASS, "DistributedDataParallel"):
            self._reference(node, name.path)
        elif name.path in ("MixedPrecision", "CPUOffload") and self._is_type(node):
            self.plan.texts[node] = self.plan.use(
                {"MixedPrecision": "MixedPrecisionPolicy"}.get(name.path, "OffloadPolicy")
            )
            self._handle(node)

    def _is_part(self, node: cst.CSTNode, parent: cst.Attribute) -> bool:
        """Whether the longer name is the one that counts."""
        if parent.value is not node:
            return True
        longer = self.project.resolve(self.file, parent)
        return longer is not None and longer.kind in ("fsdp", "ddp")

    def _is_type(self, node: cst.CSTNode) -> bool:
        around = self.file.above(node, cst.Annotation, cst.Call, cst.SimpleStatementLine)
        if isinstance(around, cst.Call):
            return self.file.code(around.func) in ("isinstance", "issubclass")
        return isinstance(around, cst.Annotation)

    def _reference(self, node: cst.Name | cst.Attribute, path: str) -> None:
        parent = self.file.parents.get(node)
        if self._is_type(node):
            self.plan.texts[node] = self.plan.use("FSDPModule")
            self._handle(node)
            self.plan.say(node, row("calls", f"isinstance(module, {_CLASS})"), key=path)
        elif isinstance(parent, cst.Assign) and parent.value is node and path == _CLASS:  # another name for it
            self.plan.texts[node] = self.plan.use("fully_shard")
            self._handle(node)
        elif isinstance(parent, cst.Call) and parent.func is node:
            return  # decided, or left with a reason
        else:
            manual_change(
                self.plan, node, path, "the class itself is used as a value; what it is for was not found out"
            )

    def _drop_variables(self) -> None:
        """Policies and settings that nothing uses any more go away, with all names in them."""
        for node in list(self.file.walk()):
            if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1 or node in self.plan.removed:
                continue
            statement = node.body[0]
            if not isinstance(statement, cst.Assign) or not isinstance(target := statement.targets[0].target, cst.Name):
                continue
            scope = self.file.scope(target)
            found = [a for a in (scope[target.value] if scope is not None else ()) if isinstance(a, Assignment)]
            uses = [access.node for each in found for access in each.references]
            if len(found) == 1 and uses and all(use in self.plan.handled for use in uses):
                self.plan.removed.add(node)
                self._handle_all(statement.value)

    # ---- imports -------------------------------------------------------------------------------------------------

    def _drop_imports(self) -> None:
        """Imported names of torch's FSDP and DDP that nothing uses any more, and FSDP2's, which are imported anew."""
        for scope in set(self.file.scopes.values()):
            for assignment in scope.assignments:
                if not isinstance(assignment, ImportAssignment):
                    continue
                name = self.project.find(self.file, assignment)
                uses = [access.node for access in assignment.references]
                moved = name is not None and name.kind == "fsdp" and name.path in FSDP2_NAMES
                gone = name is not None and name.kind in ("fsdp", "ddp") and bool(uses)
                if moved or (gone and all(map(self._is_gone, uses))):
                    self.plan.dropped.setdefault(assignment.node, set()).add(assignment.name)

    def _is_gone(self, use: cst.CSTNode) -> bool:
        """Whether the use of a name, or something around it, is gone."""
        node: cst.CSTNode | None = use
        while node is not None and not isinstance(node, cst.BaseStatement):
            if node in self.plan.handled or node in self.plan.texts:
                return True
            node = self.file.parents.get(node)
        return node in self.plan.removed


_CLASS_METHODS = ("summon_full_params", "state_dict_type", "set_state_dict_type", *_OPTIMIZER_STATES, "fsdp_modules")


def _assigns(statement: cst.CSTNode | None, value: cst.BaseExpression) -> str:
    """The one name that `name = value` gives, or ""."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        line = statement.body[0]
        target: cst.CSTNode | None = None
        if isinstance(line, cst.Assign) and line.value is value and len(line.targets) == 1:
            target = line.targets[0].target
        elif isinstance(line, cst.AnnAssign) and line.value is value:
            target = line.target
        if isinstance(target, (cst.Name, cst.Attribute)):
            return cst.Module([]).code_for_node(target)
    return ""


def _statements(body: cst.BaseSuite) -> list[cst.CSTNode]:
    """Without documentation and `pass`."""
    found: list[cst.CSTNode] = []
    for line in body.body:
        parts = line.body if isinstance(line, cst.SimpleStatementLine) else [line]
        for part in parts:
            is_text = isinstance(part, cst.Expr) and isinstance(part.value, (cst.SimpleString, cst.ConcatenatedString))
            if not isinstance(part, cst.Pass) and not is_text:
                found.append(part)
    return found


def _is_bare(node: cst.ClassDef) -> bool:
    return len(node.bases) == 1 and not _statements(node.body)


def _only_super_init(node: cst.ClassDef) -> cst.Call | None:
    """The call of `super().__init__` of a class that has nothing else."""
    inner = _statements(node.body)
    if len(node.bases) != 1 or len(inner) != 1 or not isinstance(inner[0], cst.FunctionDef):
        return None
    lines = _statements(inner[0].body)
    if inner[0].name.value != "__init__" or len(lines) != 1 or not isinstance(lines[0], cst.Expr):
        return None
    call = lines[0].value
    if isinstance(call, cst.Call) and cst.Module([]).code_for_node(call.func) == "super().__init__":
        return call
    return None
