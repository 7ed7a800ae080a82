"""Calls that wrap a model: their settings become arguments of `fully_shard`, their policies become loops."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

from ..verdict import DROPPED, UNSUPPORTED
from . import arguments as tables
from .arguments import TOLD, row
from .edits import Blocked, Text
from .flow import OPTIMIZER, Slot
from .program import Program
from .project import File

_NUMEL = "sum(p.numel() for p in {module}.parameters() if not isinstance(p, DTensor))"
_WORLD = ("torch.distributed.group.WORLD", "torch.distributed.distributed_c10d.group.WORLD")
_SAID_ALWAYS = ("limit_all_gathers", "use_orig_params", "forward_prefetch")
_COMPREHENSIONS = (ast.IfExp, ast.Lambda, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Units(NamedTuple):
    """The modules that a wrap policy chose: a condition on {module}, in {model}. `nested`: units may hold others."""

    condition: str
    nested: bool = True


class Wrappings:
    """Decides about the wrapping calls of one program. All methods raise `Blocked` for what is not rewritten."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.converted: set[ast.AST] = set()  # settings that several models may have

    def _given(self, call: ast.Call, positions: tuple[str, ...]) -> dict[str, ast.expr]:
        given = self.program.named(call, positions)
        if "module" not in given:
            raise Blocked(call, "no_model")
        if unknown := [name for name in given if name not in positions]:
            raise Blocked(call, "no_argument", unknown[0])
        return given

    def _check_effects(self, file: File, given: dict[str, ast.expr], kept: dict[str, Text | None]) -> None:
        for name, value in given.items():
            if name != "module" and kept.get(name) is None and not self.program.is_value(file, value):
                raise Blocked(value, "effect", f"{name}={file.code(value)}")

    # ---- FSDP1 and DDP ---------------------------------------------------------------------------------------------

    def fsdp1(self, file: File, call: ast.Call) -> None:
        """Rewrites a call of `FullyShardedDataParallel(...)`."""
        given, edits = self._given(call, tables.FSDP1_ARGUMENTS), self.program.edits[file]
        new: dict[str, Text | None] = {}
        before: list[Text] = []
        after: list[Text] = []
        function, units = "fully_shard", None
        for name, value in given.items():
            text = " ".join(file.code(value).split())
            if name == "sharding_strategy":
                function, new[name] = self._strategy(file, value, given)
            elif name == "backward_prefetch":
                text = self.program.path(file, self.program.values(file, value)[0][1]).rpartition(".")[2] or text
                known = {each.old: each for each in tables.FSDP1}
                edits.say(value, known.get(f"{name}={text}", known[f"{name}=BACKWARD_PRE"]), text)
            elif name != "module" and (text not in ("None", "False") or name in _SAID_ALWAYS):
                if name == "auto_wrap_policy":
                    units = self._units(file, value)
                elif name == "sync_module_states":
                    if text != "True":
                        raise Blocked(value, "unknown", f"{name}={text}")
                    before.append((f"{edits.use('sync_module_states')}({{model}})",))
                elif name == "param_init_fn" and file.code(given.get("sync_module_states", call)) == "True":
                    edits.tell(value, name, DROPPED, "sync_module_states fills what is on the meta device")
                    continue
                elif name == "param_init_fn":
                    after.append((f"{edits.use('materialize')}({{model}}, init=", value, ")"))
                    new[name] = ()
                else:
                    new[name] = self._option(file, name, value, given)
                edits.say(value, row("fsdp", name), text)
        self._check_effects(file, given, new)
        if not {"param_init_fn", "sync_module_states"} & set(given):
            if any(sign in f.text for f in self.program.files for sign in ('"meta"', "'meta'", "init_empty_weights")):
                raise Blocked(call, "meta")
        new.pop("param_init_fn", None)
        self._write(file, call, function, given, new, before, units, after)
        edits.say(call, row("calls", "FullyShardedDataParallel(model)"), key="FullyShardedDataParallel")

    def _option(self, file: File, name: str, value: ast.expr, given: dict[str, ast.expr]) -> Text | None:
        """The argument of `fully_shard` that an argument of FSDP1 becomes, None for none."""
        if name == "mixed_precision":
            self._precision(file, value, given.get("auto_wrap_policy"))
            return "mp_policy=", value
        if name == "cpu_offload":
            self._offload(file, value)
            return "offload_policy=", value
        if name == "ignored_modules":
            return "ignored_params={p for ignored in ", value, " for p in ignored.parameters()}"
        if name == "ignored_states":
            found = self.program.values(file, value)[0][1]
            elements = found.elts if isinstance(found, (ast.List, ast.Set, ast.Tuple)) else []
            if not elements or not all(isinstance(e, ast.Attribute) and e.attr in ("weight", "bias") for e in elements):
                raise Blocked(value, "ignored_states")
            return "ignored_params=set(", value, ")"
        if name == "device_mesh":
            return "mesh=", value
        if name == "process_group" and self.program.dotted(file, value) not in _WORLD:
            return self._mesh(file, value)
        return None

    def ddp(self, file: File, call: ast.Call) -> None:
        """Rewrites a call of `DistributedDataParallel(...)`."""
        given, edits = self._given(call, tables.DDP_ARGUMENTS), self.program.edits[file]
        new: dict[str, Text | None] = {}
        before: list[Text] = []
        if "init_sync" not in given or file.code(given["init_sync"]) != "False":
            before.append((f"{edits.use('sync_module_states')}({{model}})",))
            edits.say(call, row("ddp", "init_sync"), "True", default="init_sync" not in given)
        if "broadcast_buffers" not in given and "forward_sync_buffers" not in given:
            edits.say(call, row("ddp", "broadcast_buffers"), "True", default=True)
        for name, value in given.items():
            text = " ".join(file.code(value).split())
            if name in ("module", "init_sync") or text == "None":
                continue
            if name in ("process_group", "device_mesh"):
                new[name] = self._mesh(file, value) if name == "process_group" else ("mesh=", value)
            edits.say(value, row("ddp", name), text)
        self._check_effects(file, given, new)
        self._write(file, call, "fully_shard", given, new, before, None, [])
        edits.say(call, row("calls", "DistributedDataParallel(model)"), key="DistributedDataParallel")

    def _mesh(self, file: File, value: ast.expr) -> Text:
        if isinstance(value, ast.Tuple):
            raise Blocked(value, "group_pair")
        mesh = self.program.edits[file].use("DeviceMesh", "torch.distributed.device_mesh")
        return f"mesh={mesh}.from_group(", value, f', "{self.program.device}")'

    # ---- the new lines ---------------------------------------------------------------------------------------------

    def _write(self, file: File, call: ast.Call, function: str, given: dict[str, ast.expr], new: dict[str, Text | None],
               before: list[Text], units: Units | None, after: list[Text]) -> None:  # fmt: skip
        edits, model, statement = self.program.edits[file], given["module"], file.statement(call)
        after = [*after, *self._rebind(file, call, model)]
        plain, target = _is_chain(model), _target(statement, call)
        name = file.code(model) if plain else ""
        if before or units or after:
            self._check_place(file, call, statement)
            if after and isinstance(statement, ast.Return):
                raise Blocked(call, "returned")
            if not plain:
                if target is None and not isinstance(statement, ast.Return):
                    raise Blocked(call, "nameless")
                name = file.code(target) if target is not None else edits.fresh("model", "sharded")
                kind = f": {file.code(statement.annotation)}" if isinstance(statement, ast.AnnAssign) else ""
                edits.before(statement, f"{name}{kind} = ", model)
            for lines, add in ((before, edits.before), (after, edits.after)):
                for text in lines:
                    add(statement, *(p.replace("{model}", name) if isinstance(p, str) else p for p in text))
        options = {argument: text for argument, text in new.items() if text is not None}
        called = edits.use(function)
        if units is not None:
            options = self._loop(file, statement, called, units, name, options)
        by_value: dict[ast.AST, str] = {value: argument for argument, value in given.items()}
        pairs: list[tuple[Any, Text | None]] = []
        for old in [*call.args, *call.keywords]:
            argument = by_value[old.value if isinstance(old, ast.keyword) else old]
            head = "module=" if isinstance(old, ast.keyword) else ""
            replaced: Text = (old,) if plain or not name else (f"{head}{name}",)
            pairs.append((old, replaced if argument == "module" else options.pop(argument, None)))
        edits.rewrite_call(call, called, [*pairs, *((None, text) for text in options.values())])
        if name and target is not None and file.code(target) == name:
            edits.spans.append((file.span(statement)[0], file.span(call)[0], ()))

    def _check_place(self, file: File, call: ast.Call, statement: Any) -> None:
        """Lines can go around the statement only if it always runs the call, and is on lines of its own."""
        for around in file.around(call):
            if around is statement:
                break
            if isinstance(around, _COMPREHENSIONS):
                raise Blocked(call, "in_expression")
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)) or not file.is_alone(statement):
            raise Blocked(call, "no_line")
        if any(c is not call and file.statement(c) is statement for f, c, _ in self.program.flow.wraps if f is file):
            raise Blocked(call, "one_line")

    def _loop(self, file: File, statement: Any, function: str, units: Units, model: str,
              options: dict[str, Text]) -> dict[str, Text]:  # fmt: skip
        """Shards the units of a policy one by one; returns the options as the last call has them."""
        edits = self.program.edits[file]
        module = edits.fresh("module", "submodule", "unit")
        simple = (ast.Name, ast.Constant, ast.Attribute)
        parts = [part for text in options.values() for part in text]
        if all("{" not in part if isinstance(part, str) else isinstance(part, simple) for part in parts):
            shown = [each for text in options.values() for each in (", ", *text)]
        else:
            settings = edits.fresh("fsdp_kwargs", "shard_kwargs")
            entries: list[str | ast.AST] = []
            for text in options.values():
                key, _, rest = str(text[0]).partition("=")
                entries += [", " if entries else "", f'"{key}": {rest}', *text[1:]]
            edits.before(statement, f"{settings} = {{", *entries, "}")
            shown, options = [f", **{settings}"], {"": (f"**{settings}",)}
        modules = f"reversed(list({model}.modules()))" if units.nested else f"{model}.modules()"
        test = units.condition.replace("{module}", module).replace("{model}", model)
        head = f"for {module} in {modules}:\n    if {test}:\n        {function}({module}"
        edits.before(statement, head, *shown, ")")
        return options

    # ---- an optimizer from before ----------------------------------------------------------------------------------

    def _rebind(self, file: File, call: ast.Call, model: ast.expr) -> list[Text]:
        """An optimizer that was built before the model is wrapped continues with the sharded parameters."""
        flow, earlier, found = self.program.flow, self.program.flow.before(file, model), []
        for owner, made in flow.optimizers:
            models = [
                each.value
                for each in ast.walk(made)
                if isinstance(each, ast.Attribute) and each.attr in ("parameters", "named_parameters")
            ]
            late = owner.scope(made) is file.scope(call) and owner.span(made)[0] > file.span(call)[0]
            if late or not any(flow.slots(owner, m) & earlier and not flow.wrapped(owner, m) for m in models):
                continue
            target = _target(owner.statement(made), made)
            here = file.code(target) if target is not None and owner.scope(made) is file.scope(call) else None
            if here is None and isinstance(target, ast.Name) and not owner.loads(target):
                continue  # nobody uses it
            here = here or self._optimizer_here(file, call, owner, made)
            if here is None:
                reason = TOLD["optimizer"].format(file.place(call))
                self.program.edits[owner].tell(made, "optimizer", UNSUPPORTED, reason)
            else:
                found.append((f"{self.program.edits[file].use('rebind_optimizer')}({here}, {{model}})",))
                self.program.edits[owner].say(
                    made, row("calls", "optimizer built before the model is wrapped"), key="optimizer"
                )
        return list(dict.fromkeys(found))

    def _optimizer_here(self, file: File, call: ast.Call, owner: File, made: ast.Call) -> str | None:
        """The variable that holds the optimizer `made` where the model is wrapped."""
        flow, scope, statement = self.program.flow, file.scope(call), owner.statement(made)
        slots: set[Slot] = {("result", owner.scope(made), number) for number in range(-1, 8)}
        if isinstance(statement, ast.Assign):
            slots = {slot for target in statement.targets for slot in flow.slots(owner, target)}
        for name, bindings in file.bindings.get(scope, {}).items():
            slot = ("var", scope, name)
            first = min(file.span(b.node)[0] if hasattr(b.node, "lineno") else 0 for b in bindings)
            if first < file.span(call)[0] and OPTIMIZER in flow.held.get(slot, ()) and flow.origins_of({slot}) & slots:
                return name
        return None

    # ---- settings --------------------------------------------------------------------------------------------------

    def _strategy(self, file: File, value: ast.expr, given: dict[str, ast.expr]) -> tuple[str, Text | None]:
        """The function, and the argument that the strategy becomes."""
        known = {each.old.partition("=")[2]: each for each in tables.STRATEGIES}
        leaves = self._choices(file, value)
        names = {self.program.path(f, v).rpartition(".")[2] or f.code(v) for f, v in leaves}
        names = {"FULL_SHARD" if name == "None" else name for name in names}
        if not names <= set(known):
            raise Blocked(value, "unknown", f"sharding_strategy={file.code(value)}")
        for name in sorted(names):
            self.program.edits[file].say(value, known[name], name)
        if len(names) > 1 and not names <= {"FULL_SHARD", "SHARD_GRAD_OP"}:
            raise Blocked(value, "several_strategies", file.code(value))
        if len(names) > 1:
            for owner, leaf in leaves:
                keeps = self.program.path(owner, leaf).endswith("SHARD_GRAD_OP")
                self._convert(owner, leaf, "False" if keeps else "None")
            return "fully_shard", ("reshard_after_forward=", value)
        (name,) = names
        if "HYBRID" in name and "device_mesh" not in given:
            raise Blocked(value, "hybrid")
        if name == "NO_SHARD" and {"ignored_states", "ignored_modules", "device_mesh", "process_group"} & set(given):
            raise Blocked(value, "no_shard")
        keeps = name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
        return "replicate" if name == "NO_SHARD" else "fully_shard", ("reshard_after_forward=False",) if keeps else None

    def _choices(self, file: File, value: ast.expr) -> list[tuple[File, Any]]:
        """The strategies that an expression chooses from: of a condition, or of a dict by names that is used once."""
        found: list[tuple[File, Any]] = []
        for owner, each in self.program.values(file, value):
            table = each.value if isinstance(each, ast.Subscript) else None
            (source, entries) = self.program.project.value(owner, table)[0] if table is not None else (owner, None)
            once = isinstance(table, ast.Dict) or (isinstance(table, ast.Name) and len(owner.loads(table)) == 1)
            if isinstance(entries, ast.Dict) and once:
                found += [(source, leaf) for leaf in entries.values]
            else:
                found.append((owner, each))
        return found

    def _convert(self, file: File, node: ast.AST, *text: str | ast.AST) -> None:
        if node not in self.converted:
            self.converted.add(node)
            self.program.edits[file].replace(node, *text)
            self.program.edits[file].drop(node)

    def _precision(self, file: File, value: ast.expr, policy: ast.expr | None) -> None:
        """`MixedPrecision(...)`, where it is written, becomes `MixedPrecisionPolicy(...)`; None gets a policy."""
        for owner, made in self.program.values(file, value):
            new_name = self.program.edits[owner].use("MixedPrecisionPolicy")
            if isinstance(made, ast.Constant) and made.value is None:
                self._convert(owner, made, f"{new_name}()")
                continue
            if not isinstance(made, ast.Call) or self.program.path(owner, made.func) != "MixedPrecision":
                raise Blocked(value, "unknown", f"mixed_precision={file.code(value)}")
            given = self.program.named(made, tables.MIXED_PRECISION_ARGUMENTS)
            norms = policy is not None and any("BatchNorm" in each.text for each in self.program.files)
            if "_module_classes_to_ignore" in given or (norms and "param_dtype" in given):
                raise Blocked(made, "batch_norm")
            if made not in self.converted:
                self.converted.add(made)
                self._new_precision(owner, made, given, new_name)

    def _new_precision(self, file: File, call: ast.Call, given: dict[str, ast.expr], new_name: str) -> None:
        edits = self.program.edits[file]
        by_value: dict[ast.AST, str] = {value: name for name, value in given.items()}
        pairs: list[tuple[Any, Text | None]] = []
        new: dict[str, Text | None] = {}
        for old in [*call.args, *call.keywords]:
            value = old.value if isinstance(old, ast.keyword) else old
            name, text = by_value[value], file.code(value)
            if name not in tables.MIXED_PRECISION_ARGUMENTS:
                raise Blocked(call, "no_argument", name)
            kept: Text | None = (old,) if name in ("param_dtype", "reduce_dtype", "cast_forward_inputs") else None
            if name == "cast_root_forward_inputs" and text == "False" and "cast_forward_inputs" not in given:
                kept = "cast_forward_inputs=", value
            new[name] = kept
            pairs.append((old, kept))
            if text not in ("None", "False") or name not in ("buffer_dtype", "keep_low_precision_grads"):
                edits.say(value, row("precision", name), text)
        self._check_effects(file, given, new)
        if "reduce_dtype" not in given and "param_dtype" in given:
            pairs.append((None, ("reduce_dtype=", given["param_dtype"])))
            edits.say(call, row("precision", "reduce_dtype"), file.code(given["param_dtype"]), default=True)
        edits.rewrite_call(call, new_name, pairs)

    def _offload(self, file: File, value: ast.expr) -> None:
        """`CPUOffload(...)`, where it is written, becomes a policy."""
        for owner, made in self.program.values(file, value):
            text = "False"
            if isinstance(made, ast.Call) and self.program.path(owner, made.func) == "CPUOffload":
                given = self.program.named(made, ("offload_params",))
                text = owner.code(given["offload_params"]) if given else text
                if text in ("True", "False"):
                    self.program.edits[owner].say(made, row("offload", f"offload_params={text}"), text)
            elif not (isinstance(made, ast.Constant) and made.value is None):
                raise Blocked(value, "unknown", f"cpu_offload={file.code(value)}")
            use = self.program.edits[owner].use
            if text in ("True", "False"):
                self._convert(owner, made, f"{use('CPUOffloadPolicy' if text == 'True' else 'OffloadPolicy')}()")
            else:
                self._convert(owner, made, f"({use('CPUOffloadPolicy')}() if {text} else {use('OffloadPolicy')}())")

    # ---- policies --------------------------------------------------------------------------------------------------

    def _units(self, file: File, node: ast.expr) -> Units:
        """The units that a wrap policy chooses."""
        owner, policy = self.program.values(file, node)[0]
        kind, given = self.program.path(owner, policy), {}
        if isinstance(policy, ast.Call):
            kind, given = self.program.path(owner, policy.func), self.program.named(policy, ("classes",))
            if self.program.dotted(owner, policy.func) == "functools.partial" and policy.args:
                kind = self.program.path(owner, given.pop("classes"))
        classes = given.get("classes", given.get("module_classes", given.get("transformer_layer_cls")))
        here = len(self.program.values(file, node)) == 1 and owner is file and self._means_the_same(file, node, policy)
        self.program.edits[file].drop(node)
        if here and kind in ("ModuleWrapPolicy", "transformer_auto_wrap_policy") and classes is not None:
            return self._by_class(file, classes)
        if here and kind == "size_based_auto_wrap_policy" and set(given) <= {"min_num_params"}:
            use = self.program.edits[file].use
            least = file.code(given["min_num_params"]) if given else "100_000_000"
            numel = _NUMEL.replace("DTensor", use("DTensor", "torch.distributed.tensor"))
            containers = f"({use('nn', 'torch')}.ModuleList, {use('nn', 'torch')}.ModuleDict)"
            return Units(
                f"{{module}} is not {{model}} and not isinstance({{module}}, {containers}) and {numel} >= {least}"
            )
        if here and kind == "lambda_auto_wrap_policy" and "lambda_fn" in given:
            text = file.code(given["lambda_fn"])
            text = f"({text})" if isinstance(given["lambda_fn"], ast.Lambda) else text
            return Units(f"{{module}} is not {{model}} and {text}({{module}})")
        raise Blocked(node, "policy", f"auto_wrap_policy={file.code(node)}")

    def _by_class(self, file: File, node: ast.expr) -> Units:
        owner, shown = self.program.values(file, node)[0]
        literal = isinstance(shown, (ast.Set, ast.List, ast.Tuple)) and owner is file
        if literal and shown.elts and not any(isinstance(each, ast.Starred) for each in shown.elts):
            classes = [file.code(each) for each in shown.elts]
            one = classes[0] if len(classes) == 1 else f"({', '.join(classes)})"
            self.program.edits[file].drop(node)
            name = self.program.project.resolve(file, shown.elts[0])
            if len(classes) == 1 and name is not None and isinstance(name.node, ast.ClassDef):
                return Units(f"isinstance({{module}}, {one})", nested=False)
            # Units of several classes, or of a class such as Sequential, may hold each other, and the model may be one.
            return Units(f"{{module}} is not {{model}} and isinstance({{module}}, {one})")
        return Units(f"{{module}} is not {{model}} and isinstance({{module}}, tuple({file.code(node)}))")

    def _means_the_same(self, file: File, here: ast.AST, there: ast.AST) -> bool:
        """Whether names of the expression `there` mean the same where `here` is."""
        inside = set(ast.walk(there))
        found = [file.lookup(each) for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
        return all(each is None or each[0] in (file.tree, file.scope(here)) or each[0] in inside for each in found)


def _is_chain(node: ast.expr) -> bool:
    """a.b.c"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _target(statement: Any, value: ast.expr) -> ast.expr | None:
    """The one name that `name = value` gives, or None."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    of_value = getattr(statement, "value", None) is value and isinstance(statement, (ast.Assign, ast.AnnAssign))
    return targets[0] if of_value and len(targets) == 1 and isinstance(targets[0], (ast.Name, ast.Attribute)) else None
