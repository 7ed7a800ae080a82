"""Calls that wrap a model: their settings become arguments of `fully_shard`, their policies become loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ..verdict import EQUIVALENT, UNSUPPORTED
from . import arguments as tables
from .arguments import row
from .plan import NewCall, Part, Plan, Source, Units, Wrapping
from .project import Project

_NUMEL = "sum(p.numel() for p in {module}.parameters() if not isinstance(p, DTensor))"


class ManualChange(Exception):
    """The call stays as it is; the text says why."""


class Wrappings:
    """Decides about the wrapping calls of one file."""

    def __init__(self, project: Project, plan: Plan) -> None:
        self.project, self.plan, self.file = project, plan, plan.file
        self.device = (
            "cuda" if any(sign in each.tree.code for each in project.files for sign in ("cuda", "nccl")) else "cpu"
        )

    # ---- settings ------------------------------------------------------------------------------------------------

    def fsdp1(self, call: cst.Call, positions: Sequence[str] = tables.FSDP1_ARGUMENTS) -> Wrapping:
        """Of `FullyShardedDataParallel(...)`. Raises `ManualChange`."""
        given = dict(self.arguments(call, positions))
        wrapping = self._start(call, given, "fully_shard")
        strategy = self._strategy(call, given, wrapping)
        for name, value in given.items():
            if name not in ("module", "sharding_strategy"):
                self._fsdp1_setting(wrapping, name, value, given)
        if "mixed_precision" in given:
            self._full_precision(given["mixed_precision"], wrapping)
        if strategy.startswith("HYBRID") or strategy.startswith("_HYBRID"):
            self._hybrid(call, given, wrapping)
        if self._is_meta(wrapping) and "param_init_fn" not in given and "sync_module_states" not in given:
            wrapping.after.append(f"{self.plan.use('materialize')}({{model}})")
            self.plan.say(call, row("fsdp", "param_init_fn"), "reset_parameters()", default=True)
        return wrapping

    def ddp(self, call: cst.Call) -> Wrapping:
        """Of `DistributedDataParallel(...)`. Raises `ManualChange`."""
        given = dict(self.arguments(call, tables.DDP_ARGUMENTS))
        wrapping = self._start(call, given, "fully_shard")
        known = {each.old: each for each in tables.DDP}
        sync = given.pop("init_sync", None)
        if sync is None or self.text(sync) != "False":
            wrapping.before.append(f"{self.plan.use('sync_module_states')}({{model}})")
            self.plan.say(call, known["init_sync"], "True", default=sync is None)
        if "broadcast_buffers" not in given and "forward_sync_buffers" not in given:
            self.plan.say(call, known["broadcast_buffers"], "True", default=True)
        for name, value in given.items():
            if name == "module":
                continue
            if name not in known:
                raise ManualChange(f"DistributedDataParallel has no argument {name}")
            text = self.text(value)
            if name in ("process_group", "device_mesh") and text != "None":
                self._mesh(wrapping, name, value)
            if text != "None":
                self.plan.say(value, known[name], text)
        return wrapping

    def _start(self, call: cst.Call, given: dict[str, cst.BaseExpression], function: str) -> Wrapping:
        if "module" not in given:
            raise ManualChange("expected the model as first argument")
        value = given["module"]
        plain = isinstance(value, cst.Name) or (isinstance(value, cst.Attribute) and _is_chain(value))
        return Wrapping(call, function, value, self.text(value) if plain else None)

    def arguments(self, call: cst.Call, positions: Sequence[str]) -> Iterator[tuple[str, cst.BaseExpression]]:
        for i, argument in enumerate(call.args):
            if argument.star == "**":
                yield from self._entries(argument.value)
            elif argument.star:
                raise ManualChange(f"what is in *{self.text(argument.value)} is not known before it runs")
            elif argument.keyword is not None:
                yield argument.keyword.value, argument.value
            elif i < len(positions):
                yield positions[i], argument.value

    def _entries(self, node: cst.BaseExpression) -> Iterator[tuple[str, cst.BaseExpression]]:
        """The settings of a dict that is written in the program, in one place."""
        found = self.value_of(node)
        if isinstance(found, cst.Dict) and all(
            isinstance(each, cst.DictElement) and isinstance(each.key, cst.SimpleString) for each in found.elements
        ):
            for element in found.elements:
                if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString):
                    yield str(element.key.evaluated_value), element.value
        elif isinstance(found, cst.Call) and self.text(found.func) == "dict" and all(a.keyword for a in found.args):
            for argument in found.args:
                if argument.keyword is not None:
                    yield argument.keyword.value, argument.value
        else:
            raise ManualChange(f"what is in **{self.text(node)} is not written in one place; pass the settings by name")
        if isinstance(node, cst.Name):
            self._forget(node)

    def _strategy(self, call: cst.Call, given: dict[str, cst.BaseExpression], wrapping: Wrapping) -> str:
        node = given.get("sharding_strategy")
        if node is None or self.text(node) == "None":
            return "FULL_SHARD"
        name = self.constant(node)
        known = {each.old.partition("=")[2]: each for each in tables.STRATEGIES}
        if name.rpartition(".")[2] not in known:
            raise ManualChange(
                f"sharding_strategy={self.text(node)} is not known before it runs; write the strategy itself"
            )
        name = name.rpartition(".")[2]
        self.plan.say(node, known[name], name)
        if name == "NO_SHARD":
            wrapping.function = "replicate"
        elif name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
            wrapping.options.append(Part("reshard_after_forward", "False"))
        return name

    def _hybrid(self, call: cst.Call, given: dict[str, cst.BaseExpression], wrapping: Wrapping) -> None:
        if "device_mesh" in given:
            return
        if "process_group" in given:
            raise ManualChange(
                "hybrid sharding over two process groups: pass device_mesh=init_device_mesh(...) instead"
            )
        mesh = self.plan.fresh("mesh", "hybrid_mesh")
        world = f"{self.plan.use('distributed', 'torch')}.get_world_size()"
        self.plan.imports.add(("os", ""))
        local = self.plan.fresh("ranks_per_node", "node_ranks")
        wrapping.before += [
            f'{local} = int(os.environ["LOCAL_WORLD_SIZE"])',
            f"{mesh} = {self.plan.use('init_device_mesh', 'torch.distributed.device_mesh')}("
            f'"{self.device}", ({world} // {local}, {local}), mesh_dim_names=("replicate", "shard"))',
        ]
        wrapping.options.append(Part("mesh", mesh))

    def _fsdp1_setting(
        self, wrapping: Wrapping, name: str, value: cst.BaseExpression, given: dict[str, cst.BaseExpression]
    ) -> None:
        text = self.text(value)
        say, options = self.plan.say, wrapping.options
        if name not in tables.FSDP1_ARGUMENTS:
            raise ManualChange(f"FullyShardedDataParallel has no argument {name}")
        if name == "backward_prefetch":
            constant = self.constant(value).rpartition(".")[2] or text
            rows = {each.old: each for each in tables.FSDP1}
            say(value, rows.get(f"backward_prefetch={constant}", rows["backward_prefetch=BACKWARD_PRE"]), constant)
            return
        if text in ("None", "False") and name not in ("limit_all_gathers", "use_orig_params", "forward_prefetch"):
            return  # the default
        found = row("fsdp", name)
        if name == "auto_wrap_policy":
            wrapping.units = self.units(value)
        elif name == "sync_module_states":
            if text != "True":
                raise ManualChange(f"sync_module_states={text} is not known before it runs; write True or False")
            wrapping.before.append(f"{self.plan.use('sync_module_states')}({{model}})")
        elif name == "param_init_fn":
            if "sync_module_states" not in given:  # which fills what is on the meta device by itself
                wrapping.after.append(f"{self.plan.use('materialize')}({{model}}, init={text})")
        elif name == "mixed_precision":
            options.append(Part("mp_policy", self._or_default(value, "MixedPrecisionPolicy")))
        elif name == "cpu_offload":
            options.append(Part("offload_policy", self._or_default(value, "OffloadPolicy")))
        elif name in ("ignored_modules", "ignored_states"):
            options.append(Part("ignored_params", self._ignored(name, value)))
        elif name in ("process_group", "device_mesh"):
            self._mesh(wrapping, name, value)
        say(value, found, text)

    def _full_precision(self, node: cst.BaseExpression, wrapping: Wrapping) -> None:
        """The modules that a policy leaves out of mixed precision, which FSDP1 does where it has a wrap policy."""
        for value in (node.body, node.orelse) if isinstance(node, cst.IfExp) else (node,):
            call = self.value_of(value)
            if isinstance(call, cst.Call) and self.class_of(call) == "MixedPrecision":
                self.plan.full.add(call)
                if wrapping.units is None:
                    self._say_unused(call)
                else:
                    wrapping.full_classes = self._left_out(call) or wrapping.full_classes
        if wrapping.full_classes:
            self.plan.use("MixedPrecisionPolicy")
            self.plan.imports.add(("torch", ""))

    def _say_unused(self, call: cst.Call) -> None:
        given = dict(self.arguments(call, tables.MIXED_PRECISION_ARGUMENTS))
        if (node := given.get("_module_classes_to_ignore")) is not None:
            self.plan.say(node, row("precision", "_module_classes_to_ignore=without a policy"), self.text(node))

    def _left_out(self, call: cst.Call) -> str:
        """The classes of a `MixedPrecision(...)`, as `isinstance` takes them; "" if there are none."""
        given = dict(self.arguments(call, tables.MIXED_PRECISION_ARGUMENTS))
        node, found = given.get("_module_classes_to_ignore"), row("precision", "_module_classes_to_ignore")
        if "param_dtype" not in given or self.text(given["param_dtype"]) == "None":
            return ""  # everything computes in full precision
        if node is None:
            if not self._has_batch_norms():
                return ""
            self.plan.say(call, found, "(BatchNorm,)", default=True)
            return self.plan.use("_BatchNorm", "torch.nn.modules.batchnorm")
        value = self.value_of(node)
        elements = value.elements if isinstance(value, (cst.List, cst.Tuple, cst.Set)) else None
        if elements is not None and not elements:
            return ""
        self.plan.say(node, found, self.text(node))
        if elements is not None and len(elements) == 1 and isinstance(elements[0], cst.Element):
            return self.text(elements[0].value)
        return f"tuple({self.text(node)})"

    def _has_batch_norms(self) -> bool:
        return any("BatchNorm" in each.tree.code for each in self.project.files)

    def say_what_is_lost(self) -> None:
        """Of policies that no wrapping of the file has with its units: nothing was sharded for their classes."""
        for call in [call for call in self.plan.calls if call not in self.plan.full]:
            if not isinstance(call, cst.Call) or self.class_of(call) != "MixedPrecision":
                continue
            given = dict(self.arguments(call, tables.MIXED_PRECISION_ARGUMENTS))
            node, found = (
                given.get("_module_classes_to_ignore"),
                row("precision", "_module_classes_to_ignore=elsewhere"),
            )
            if node is not None and self.text(node) not in ("()", "[]", "set()"):
                self.plan.say(node, found, self.text(node))
            elif node is None and self._has_batch_norms():
                self.plan.say(call, found, "(BatchNorm,)", default=True)

    def class_of(self, call: cst.Call) -> str:
        """ "MixedPrecision" of `MixedPrecision(...)`; "" of what is none of FSDP1's."""
        name = self.project.resolve(self.file, call.func)
        return name.path if name is not None and name.kind == "fsdp" else ""

    def _or_default(self, value: cst.BaseExpression, name: str) -> Source:
        """`policy if condition else None` needs a policy in place of None."""
        if isinstance(value, cst.IfExp):
            for branch in (value.body, value.orelse):
                if isinstance(branch, cst.Name) and branch.value == "None":
                    self.plan.texts[branch] = f"{self.plan.use(name)}()"
        return value

    def _ignored(self, name: str, value: cst.BaseExpression) -> str:
        """A set of parameters."""
        text = self.text(value)
        if name == "ignored_modules":
            return f"{{p for ignored in {text} for p in ignored.parameters()}}"
        found = self.value_of(value)
        elements = found.elements if isinstance(found, (cst.List, cst.Set, cst.Tuple)) else ()
        if elements and all(self._is_parameter(each.value) for each in elements):
            return f"set({text})"
        torch = self.plan.use("nn", "torch")
        return (
            f"{{p for ignored in {text} for p in "
            f"([ignored] if isinstance(ignored, {torch}.Parameter) else ignored.parameters())}}"
        )

    def _is_parameter(self, node: cst.BaseExpression) -> bool:
        return isinstance(node, cst.Attribute) and node.attr.value in ("weight", "bias")

    def _mesh(self, wrapping: Wrapping, name: str, value: cst.BaseExpression) -> None:
        if name == "device_mesh":
            wrapping.options.append(Part("mesh", value))
            return
        if isinstance(value, cst.Tuple):
            raise ManualChange(
                "hybrid sharding over two process groups: pass device_mesh=init_device_mesh(...) instead"
            )
        mesh = self.plan.use("DeviceMesh", "torch.distributed.device_mesh")
        wrapping.options.append(Part("mesh", f'{mesh}.from_group({self.text(value)}, "{self.device}")'))

    def _is_meta(self, wrapping: Wrapping) -> bool:
        """Whether the model is built under `with torch.device("meta")` where it is wrapped."""
        if wrapping.subject is None:
            return False
        owner = self.file.above(wrapping.old, cst.FunctionDef, cst.Module)
        for node in self.file.walk():
            if isinstance(node, cst.With) and self.file.above(node, cst.FunctionDef, cst.Module) is owner:
                meta = any('device("meta")' in self.text(item.item).replace("'", '"') for item in node.items)
                assigned = [
                    self.text(target.target)
                    for inner in _all(node.body)
                    if isinstance(inner, cst.Assign)
                    for target in inner.targets
                ]
                if meta and wrapping.subject in assigned:
                    return True
        return False

    # ---- policies ------------------------------------------------------------------------------------------------

    def units(self, node: cst.BaseExpression) -> Units:
        """The units that a wrap policy chooses. Raises `ManualChange`."""
        found = self.value_of(node)
        if isinstance(node, cst.Name) and found is not node:
            self._forget(node)
        if isinstance(found, cst.Call):
            return self._made_policy(found)
        name = self.project.resolve(self.file, found)
        if name is not None and name.kind == "fsdp":
            if name.path == "size_based_auto_wrap_policy":
                return self._by_size("100_000_000")
            if name.path == "always_wrap_policy":
                return Units(f"{{module}} is not {{model}} and not {self._container()}", True)
        if name is not None and name.kind == "local" and "<locals>" not in name.path:  # a policy of the program
            numel = _NUMEL.replace("DTensor", self.plan.use("DTensor", "torch.distributed.tensor"))
            called = f"{self.text(found)}(module={{module}}, recurse=False, nonwrapped_numel={numel})"
            return Units(f"{{module}} is not {{model}} and {called}", True)
        raise ManualChange(f"auto_wrap_policy={self.text(node)} is not known before it runs; shard the units in a loop")

    def _made_policy(self, call: cst.Call) -> Units:
        name = self.project.resolve(self.file, call.func)
        path = "" if name is None else name.path
        keywords = {a.keyword.value: a.value for a in call.args if a.keyword is not None}
        first = next((a.value for a in call.args if a.keyword is None and not a.star), None)
        if path == "ModuleWrapPolicy":
            return self._by_class(first or keywords["module_classes"])
        if path == "CustomPolicy":
            return self._by_function(first or keywords["lambda_fn"])
        inner = self.project.resolve(self.file, first) if path == "functools.partial" and first is not None else None
        kind = "" if inner is None or inner.kind != "fsdp" else inner.path
        if kind == "transformer_auto_wrap_policy":
            return self._by_class(keywords["transformer_layer_cls"])
        if kind == "size_based_auto_wrap_policy":
            least = keywords.get("min_num_params")
            return self._by_size("100_000_000" if least is None else self.text(least))
        if kind == "lambda_auto_wrap_policy":
            return self._by_function(keywords["lambda_fn"])
        if kind == "_or_policy" and isinstance(several := self.value_of(keywords["policies"]), (cst.List, cst.Tuple)):
            parts = [self.units(each.value) for each in several.elements]
            return Units(" or ".join(f"({part.condition})" for part in parts), True)
        if path == "functools.partial" and inner is not None and inner.kind == "local":
            numel = _NUMEL.replace("DTensor", self.plan.use("DTensor", "torch.distributed.tensor"))
            called = f"{self.text(call)}(module={{module}}, recurse=False, nonwrapped_numel={numel})"
            return Units(f"{{module}} is not {{model}} and {called}", True)
        raise ManualChange(f"auto_wrap_policy={self.text(call)} is none that torch has; shard the units in a loop")

    def _by_class(self, node: cst.BaseExpression) -> Units:
        found = self.value_of(node)
        if isinstance(found, (cst.Set, cst.List, cst.Tuple)) and not any(
            isinstance(each, cst.StarredElement) for each in found.elements
        ):
            classes = [self.text(each.value) for each in found.elements]
            one = classes[0] if len(classes) == 1 else f"({', '.join(classes)})"
            if isinstance(node, cst.Name):
                self._forget(node)
            name = self.project.resolve(self.file, found.elements[0].value)
            if len(classes) == 1 and name is not None and name.kind == "local":
                return Units(f"isinstance({{module}}, {one})", False)
            # Units of several classes, or of a class such as Sequential, may hold each other, and the model may be one.
            return Units(f"{{module}} is not {{model}} and isinstance({{module}}, {one})", True)
        return Units(f"{{module}} is not {{model}} and isinstance({{module}}, tuple({self.text(node)}))", True)

    def _by_function(self, node: cst.BaseExpression) -> Units:
        text = f"({self.text(node)})" if isinstance(node, cst.Lambda) else self.text(node)
        return Units(f"{{module}} is not {{model}} and {text}({{module}})", True)

    def _by_size(self, least: str) -> Units:
        numel = _NUMEL.replace("DTensor", self.plan.use("DTensor", "torch.distributed.tensor"))
        return Units(f"{{module}} is not {{model}} and not {self._container()} and {numel} >= {least}", True)

    def _container(self) -> str:
        nn = self.plan.use("nn", "torch")
        return f"isinstance({{module}}, ({nn}.ModuleList, {nn}.ModuleDict))"

    # ---- expressions ---------------------------------------------------------------------------------------------

    def text(self, node: cst.CSTNode) -> str:
        return self.file.code(node).strip()

    def value_of(self, node: cst.BaseExpression) -> cst.BaseExpression:
        """What a variable was given, if that is written in one place; else the expression itself."""
        if isinstance(node, cst.Name):
            found = self.file.assigned(node)
            if len(found) == 1 and found[0] is not None:
                return found[0]
        return node

    def constant(self, node: cst.BaseExpression) -> str:
        """ "ShardingStrategy.FULL_SHARD" of an expression that stands for it, or ""."""
        name = self.project.resolve(self.file, self.value_of(node))
        return name.path if name is not None and name.kind == "fsdp" else ""

    def _forget(self, node: cst.Name) -> None:
        """This use of a variable goes away; where all do, so does its assignment."""
        self.plan.handled.add(node)


def new_precision(wrappings: Wrappings, call: cst.Call) -> NewCall:
    """`MixedPrecision(...)` as `MixedPrecisionPolicy(...)`."""
    plan, parts = wrappings.plan, []
    known = {each.old: each for each in tables.MIXED_PRECISION}
    given = dict(wrappings.arguments(call, tables.MIXED_PRECISION_ARGUMENTS))
    for name, value in given.items():
        text = wrappings.text(value)
        if name not in known:
            raise ManualChange(f"MixedPrecision has no argument {name}")
        if name in ("param_dtype", "reduce_dtype"):
            parts.append(Part(name, value))
        elif name == "cast_forward_inputs" or (name == "cast_root_forward_inputs" and text == "False"):
            if "cast_forward_inputs" not in given or name == "cast_forward_inputs":
                parts.append(Part("cast_forward_inputs", value))
        says_nothing = text in ("None", "False") and name in ("buffer_dtype", "keep_low_precision_grads")
        if not says_nothing and name != "_module_classes_to_ignore":  # of which the wrapping speaks
            plan.say(value, known[name], text)
    if "reduce_dtype" not in given and "param_dtype" in given:
        parts.append(Part("reduce_dtype", given["param_dtype"]))
        plan.say(call, known["reduce_dtype"], wrappings.text(given["param_dtype"]), default=True)
    return NewCall(plan.use("MixedPrecisionPolicy"), tuple(parts))


def new_offload(wrappings: Wrappings, call: cst.Call) -> NewCall | str:
    """`CPUOffload(...)` as a policy."""
    plan = wrappings.plan
    given = dict(wrappings.arguments(call, ("offload_params",)))
    text = wrappings.text(given["offload_params"]) if "offload_params" in given else "False"
    if text in ("True", "False"):
        plan.say(call, row("offload", f"offload_params={text}"), text)
        return NewCall(plan.use("CPUOffloadPolicy" if text == "True" else "OffloadPolicy"), ())
    plan.say_verdict(call, "offload_params", EQUIVALENT, "a class for each of the two", text)
    return f"({plan.use('CPUOffloadPolicy')}() if {text} else {plan.use('OffloadPolicy')}())"


def manual_change(plan: Plan, node: cst.CSTNode, key: str, why: str) -> None:
    """Say that something stays as it is."""
    plan.say_verdict(node, key, UNSUPPORTED, why)


def _is_chain(node: cst.BaseExpression) -> bool:
    """a.b.c"""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)


def _all(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _all(child)
