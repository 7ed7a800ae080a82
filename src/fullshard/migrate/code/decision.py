"""Looks at every use of FSDP1, DDP and torch's FSDP2 in one program and decides what it becomes.

FSDP1: everything is rewritten, or, where one line has none of the shapes that are known here, nothing is, and the
program keeps FSDP1's class by the adapter. DDP has no adapter: what is not known is named, and stays.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from ..verdict import EQUIVALENT, EXACT, UNSUPPORTED
from .adapter import adapt
from .arguments import ADAPTER, FSDP2_NAMES, TOLD, row
from .edits import Blocked, Edits
from .flow import DDP, FSDP1, OPTIMIZER, Flow
from .program import Program
from .project import FUNCTIONS, File, Project
from .states import States
from .wrapping import Wrappings

CLASS, DDP_CLASS = "FullyShardedDataParallel", "DistributedDataParallel"
_MODEL = re.compile(
    r"(^|_)(model|net|network|module|fsdp|ddp|wrapped|sharded|student|policy|actor|critic)($|_|\d)", re.I
)
# Methods of a module that all ranks need not call together.
_QUIET = set(
    "eval train parameters named_parameters buffers named_buffers modules named_modules children named_children to cuda"
    " cpu zero_grad requires_grad_ register_forward_hook register_forward_pre_hook get_parameter get_submodule float "
    "half bfloat16 no_sync num_parameters gradient_checkpointing_enable compile".split()
)
_SCALERS = ("torch.cuda.amp.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler", "torch.amp.GradScaler")
_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
# Arguments of scalers by position: torch's, of which torch.cuda's has no device, and FSDP1's.
_SCALER = ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
_SHARDED_SCALER = ("device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled")
_CLASS_METHODS = ("summon_full_params", "set_state_dict_type", "fsdp_modules", "optim_state_dict_to_load")
_SUMMON = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_HELPER = '''@contextlib.contextmanager
def {name}(model):
    """Gradients stay on their rank; the next backward outside reduces all of them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
'''


class Decision(Program):
    """The decisions of one program."""

    def __init__(self, project: Project, flow: Flow, files: list[File]) -> None:
        super().__init__(project, flow, files)
        self.blocked: list[tuple[File, ast.AST, str, str]] = []
        self.wrappings, self.states = Wrappings(self), States(self)

    def decide(self, *, adapter: bool) -> dict[File, Edits]:
        uses = [(f, n, name) for f in self.files for n, name in self.references[f] if not _is_fsdp2(name.path)]
        fsdp1 = [(file, node, name.path) for file, node, name in uses if name.kind == "fsdp"]
        if self.kinds and not adapter:
            for file in self.files:
                for node in file.nodes:
                    self._visit(file, node)
            self._forget_variables()
        for file, node, name in uses if not adapter else ():
            if node not in self.edits[file].gone:
                self._left_over(file, node, name.path)
        keeps = bool(fsdp1) and (adapter or (bool(self.blocked) and FSDP1 in self.kinds))
        if keeps or self.blocked:
            self.edits = {file: Edits(self.project, file) for file in self.files}
        if keeps:
            adapt(self, fsdp1)
        for file, node, key, reason in self.blocked:
            verdict = EQUIVALENT if keeps else UNSUPPORTED
            text = f"{reason}. Until then the program keeps FSDP1's class" if keeps else reason
            self.edits[file].tell(node, key, verdict, text, new=ADAPTER if keeps else "")
        self._move_fsdp2()
        return self.edits

    # ---- one look at each node -------------------------------------------------------------------------------------

    def _visit(self, file: File, node: Any) -> None:
        edits, count = self.edits[file], len(self.edits[file].findings)
        try:
            if isinstance(node, ast.Call) and node.func not in edits.gone:
                self._call(file, node)
            elif isinstance(node, ast.With):
                for item in node.items if FSDP1 in self.kinds else ():
                    if self.states.is_method(file, item.context_expr, "state_dict_type"):
                        self.states.context(file, node, item)
            elif isinstance(node, ast.Attribute) and self.flow.wrapped(file, node.value):
                if node.attr == "module" and isinstance(node.ctx, ast.Load):
                    edits.replace(node, node.value)
                    edits.say(node, row("calls", "model.module"))
                elif node.attr == "require_backward_grad_sync":
                    self._grad_sync(file, node)
        except Blocked as error:
            del edits.findings[count:]
            name = self.project.resolve(file, node.func) if isinstance(node, ast.Call) else None
            known = name is not None and name.kind in ("fsdp", "ddp")
            key = "state_dict_type" if isinstance(node, ast.With) else file.code(getattr(node, "func", node))
            self.blocked.append((file, error.node, name.path if known and name is not None else key, error.reason))

    def _call(self, file: File, call: ast.Call) -> None:
        path, dotted, edits = self.path(file, call.func), self.dotted(file, call.func), self.edits[file]
        name = self.project.resolve(file, call.func)
        if path == CLASS:
            self.wrappings.fsdp1(file, call)
        elif name is not None and name.kind == "ddp" and name.path == DDP_CLASS:
            self.wrappings.ddp(file, call)
        elif path == "ShardedGradScaler" or (DDP in self.kinds and dotted in _SCALERS):
            names = _SHARDED_SCALER if path else _SCALER[1:] if ".cuda." in dotted else _SCALER
            pairs: list[Any] = [
                (v, (v,) if n == "device" else (f"{n}=", v)) for n, v in zip(names, call.args, strict=False)
            ]
            pairs += [(k, (k,) if k.arg != "process_group" else None) for k in call.keywords]
            edits.rewrite_call(call, edits.use("GradScaler"), pairs)
            edits.say(call, row("calls", "ShardedGradScaler"), key=path or "GradScaler")
        elif dotted in _CLIPS:
            edits.replace(call.func, edits.use("clip_grad_norm_"))
            edits.say(call, row("calls", "clip_grad_norm_()"))
        elif dotted in ("builtins.isinstance", "builtins.issubclass"):
            inside = set(ast.walk(call))
            for node, found in self.references[file]:
                if node in inside and found.path in (CLASS, DDP_CLASS):
                    self._as_type(file, node)
                    edits.say(node, row("calls", f"isinstance(module, {CLASS})"), key=found.path)
        elif path.startswith(f"{CLASS}.") and FSDP1 in self.kinds:
            self._class_method(file, call, path.partition(".")[2])
        elif self.flow.wrapped(file, call.func):
            self._on_all_ranks(file, call)
        elif isinstance(call.func, ast.Attribute) and not path:
            self._method(file, call, call.func)
        if not path and not self.flow.maker(file, call.func):
            self._passed(file, call, dotted)

    def _as_type(self, file: File, node: ast.AST) -> None:
        self.edits[file].replace(node, self.edits[file].use("FSDPModule"))
        self.edits[file].drop(node)

    # ---- methods ---------------------------------------------------------------------------------------------------

    def _method(self, file: File, call: ast.Call, func: ast.Attribute) -> None:
        model, method, edits = func.value, func.attr, self.edits[file]
        kinds = self.flow.kinds(file, model)
        only_ddp = DDP in self.kinds and FSDP1 not in self.kinds
        if kinds & {FSDP1, DDP}:
            if method == "no_sync":
                self._no_sync(file, call, model)
            elif method == "state_dict":
                self.states.model_state(file, call, model, FSDP1 if FSDP1 in kinds else DDP)
            elif FSDP1 in kinds and method == "clip_grad_norm_":
                self._clip(file, call, model, [*call.args, *call.keywords])
            elif FSDP1 in kinds and method in (*_CLASS_METHODS, *self.states.OPTIMIZER, "register_comm_hook"):
                self._class_method(file, call, method)
            elif method in ("register_comm_hook", "join", "save_pretrained"):
                edits.tell(call, f"{method}()", UNSUPPORTED, row("calls", f"{method}()").reason)
            elif method not in _QUIET:
                self._on_all_ranks(file, call)
        elif method in ("state_dict", "load_state_dict") and only_ddp and self._is_optimizer(file, model):
            edits.tell(call, f"optimizer.{method}()", UNSUPPORTED, row("calls", f"optimizer.{method}() of DDP").reason)
        elif method in ("no_sync", "state_dict", "clip_grad_norm_") and self._may_be_wrapped(file, call, func):
            if FSDP1 in self.kinds:
                raise Blocked(call, "not_found_out", file.code(model))
            edits.tell(call, f"{method}()", UNSUPPORTED, TOLD["not_found_out"].format(file.code(model)))

    def _is_optimizer(self, file: File, node: ast.AST) -> bool:
        return OPTIMIZER in self.flow.kinds(file, node) or "optim" in _last(node).lower()

    def _may_be_wrapped(self, file: File, call: ast.Call, func: ast.Attribute) -> bool:
        """Whether nothing is known about what has the method: a parameter of a function that nobody calls here, an
        attribute of another object; and by its name it may be a model."""
        node = func.value
        if not (_MODEL.search(_last(node)) or (func.attr == "no_sync" and not call.args)):
            return False
        contexts = [item.context_expr for w in file.around(call) if isinstance(w, ast.With) for item in w.items]
        if any(self.states.is_method(file, each, "state_dict_type") for each in contexts):
            return False
        name = self.project.resolve(file, node)
        if self.flow.kinds(file, node) or (name is not None and name.kind == "other"):
            return False
        slots = self.flow.slots(file, node)
        if any(slot in self.flow.origins for slot in slots):
            return False
        bindings = [b for slot in slots if slot[0] == "var" for b in file.bindings.get(slot[1], {}).get(slot[2], [])]
        return not any(b.value is not None or isinstance(b.node, (*FUNCTIONS, ast.ClassDef)) for b in bindings)

    def _on_all_ranks(self, file: File, call: ast.Call) -> None:
        """A call on a model that DDP lets one rank make alone."""
        if DDP in self.kinds and (found := self.ranks.guard(file, call)) is not None:
            key = f"{file.code(call.func)}()"
            self.edits[file].tell(call, key, UNSUPPORTED, TOLD["some_ranks"].format(found))

    def _passed(self, file: File, call: ast.Call, dotted: str) -> None:
        """A wrapped model that goes to a function of others, on some ranks or to a file."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if self.flow.callee(file, call) is not None or not any(
            self.flow.wrapped(file, each) and not isinstance(each, ast.Call) for each in given
        ):
            return
        known = {"torch.save": "pickled", "pickle.dump": "pickled", "copy.deepcopy": "copied"}
        if dotted in known:
            self.edits[file].tell(call, dotted, UNSUPPORTED, TOLD[known[dotted]])
        elif not dotted.startswith("builtins.") and _last(call.func) not in ("append", "add", "compile"):
            self._on_all_ranks(file, call)

    def _no_sync(self, file: File, call: ast.Call, model: ast.expr) -> None:
        edits = self.edits[file]
        helper = "without_gradient_sync" if any("no_sync" in each for each in file.bindings.values()) else "no_sync"
        edits.helpers.add(_HELPER.format(name=helper))
        edits.wanted.add(("contextlib", ""))
        edits.replace(call, f"{helper}(", model, ")")
        edits.drop(call.func)
        edits.say(call, row("calls", "no_sync()"))

    def _grad_sync(self, file: File, node: ast.Attribute) -> None:
        """`model.require_backward_grad_sync = condition`."""
        edits, statement = self.edits[file], file.statement(node)
        if isinstance(statement, ast.Assign) and statement.targets == [node]:
            edits.replace(statement, node.value, ".set_requires_gradient_sync(", statement.value, ")")
            edits.say(node, row("calls", "require_backward_grad_sync"))
        else:
            edits.tell(node, node.attr, UNSUPPORTED, TOLD["sync_read"])

    def _clip(self, file: File, call: ast.Call, model: ast.expr, others: list[Any]) -> None:
        edits = self.edits[file]
        rest = [part for each in others for part in (", ", each)]
        edits.replace(call, f"{edits.use('clip_grad_norm_')}(", model, ".parameters()", *rest, ")")
        edits.drop(call.func)
        edits.say(call, row("calls", "clip_grad_norm_()"))

    def _class_method(self, file: File, call: ast.Call, method: str) -> None:
        edits = self.edits[file]
        if method == "clip_grad_norm_" and call.args:
            self._clip(file, call, call.args[0], [*call.args[1:], *call.keywords])
        elif method == "summon_full_params":
            given = self.named(call, _SUMMON)
            if "module" not in given:
                raise Blocked(call, "no_model")
            if "with_grads" in given and file.code(given.pop("with_grads")) != "False":
                raise Blocked(call, "with_grads")
            rest = [part for name, value in given.items() if name != "module" for part in (f", {name}=", value)]
            default = "writeback" not in given
            rest += [", writeback=True"] if default else []
            edits.replace(call, f"{edits.use('full_params')}(", given["module"], *rest, ")")
            edits.drop(call.func)
            value = "writeback=True" if default else ""
            edits.say(call, row("calls", "summon_full_params()"), value, default=default)
        elif method == "set_state_dict_type":
            self.states.statement(file, call)
        elif method in self.states.OPTIMIZER:
            self.states.optimizer_state(file, call, method)
        elif method == "optim_state_dict_to_load":
            self.states.loaded_state(file, call)
        elif method == "fsdp_modules" and len(call.args) == 1 and not call.keywords:
            module, kind = edits.fresh("module", "submodule", "unit"), edits.use("FSDPModule")
            edits.replace(
                call, f"[{module} for {module} in ", call.args[0], f".modules() if isinstance({module}, {kind})]"
            )
            edits.drop(call.func)
            edits.tell(call, "fsdp_modules()", EXACT, "sharded modules have this class")
        elif method != "state_dict_type" or not isinstance(file.parents[call], ast.withitem):
            raise Blocked(call, "method", method)

    # ---- what is left ----------------------------------------------------------------------------------------------

    def _left_over(self, file: File, node: ast.AST, path: str) -> None:
        """A name that nothing has rewritten: a type in an annotation, or something that is not known."""
        parent, statement = file.parents[node], file.statement(node)
        if path in (CLASS, DDP_CLASS) and self._is_annotation(file, node):
            self._as_type(file, node)
            return
        if self.kinds and any(each[0] is file and file.statement(each[1]) is statement for each in self.blocked):
            return
        if self.kinds and self.blocked and path not in (CLASS, DDP_CLASS, "wrap", "enable_wrap"):
            return  # it belongs to what was named
        call = file.parents[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(parent, ast.ClassDef):
            error = Blocked(node, "subclass", parent.name)
        elif self.project.resolve(file, node) is None:
            error = Blocked(node, "either")
        elif path.startswith("_") and path not in ("_or_policy", "_module_wrap_policy"):
            error = Blocked(node, "private", path)
        elif not self.kinds and isinstance(call, ast.Call) and call.func is not node:
            error = Blocked(node, "library", file.code(call.func))
        else:
            error = Blocked(node, "other")
        self.blocked.append((file, node, path, error.reason))

    def _is_annotation(self, file: File, node: ast.AST) -> bool:
        child = node
        for around in file.around(node):
            if isinstance(around, (ast.arg, ast.AnnAssign)):
                return child is around.annotation
            if isinstance(around, (ast.stmt, ast.Call)):
                return isinstance(around, FUNCTIONS) and child is around.returns
            child = around
        return False

    def _forget_variables(self) -> None:
        """Settings of FSDP1 in variables that nothing uses go away. What may do more than give a value stays."""
        for file in self.files:
            edits = self.edits[file]
            for node in [each for each in file.nodes if isinstance(each, ast.Assign) and file.is_alone(each)]:
                target, inside = node.targets[0], set(ast.walk(node.value))
                if len(node.targets) > 1 or not isinstance(target, ast.Name):
                    continue
                if not any(each in inside for each, _ in self.references[file]) or not self.is_value(file, node.value):
                    continue
                uses = file.loads(target)
                if uses and all(use in edits.gone for use in uses) and not self._is_imported(file, target.id):
                    edits.remove(node)

    def _is_imported(self, file: File, name: str) -> bool:
        paths = [b.path for f in self.files for names in f.bindings.values() for b in names.get(name, ()) if b.path]
        found = [self.project.definition(other, path) for path in paths for other in self.files]
        return any(each is not None and each[0] is file for each in found)

    # ---- FSDP2 -----------------------------------------------------------------------------------------------------

    def _move_fsdp2(self) -> None:
        for file, edits in self.edits.items():
            for statement in [n for n in file.nodes if isinstance(n, ast.ImportFrom) and n.module and not n.level]:
                for alias in statement.names:
                    found = self.project.follow(file, f"{statement.module}.{alias.name}", [], 0)
                    if any(name.kind == "fsdp" and name.path in FSDP2_NAMES for name in found):
                        edits.moved[alias] = "fullshard"
                        self._say_fsdp2(edits, statement, alias.name)
            for node, name in self.references[file]:
                if isinstance(node, ast.Attribute) and name.path in FSDP2_NAMES:
                    edits.replace(node, edits.use(name.path))
                    edits.drop(node)
                    self._say_fsdp2(edits, node, name.path)

    def _say_fsdp2(self, edits: Edits, node: ast.AST, name: str) -> None:
        if name == "fully_shard":
            edits.say(node, row("calls", "torch.distributed.fsdp.fully_shard"), key="fully_shard")


def _is_fsdp2(path: str) -> bool:
    return path.partition(".")[0] in FSDP2_NAMES


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
