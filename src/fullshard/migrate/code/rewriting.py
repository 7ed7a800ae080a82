"""Carries out a plan on the tree of its file. Decides nothing; what is not in the plan keeps its formatting."""

from __future__ import annotations

from typing import Any

import libcst as cst

from .arguments import FSDP2_NAMES
from .plan import NewCall, Of, Part, Plan, Source, Wrapping

_NO_SYNC = '''@contextlib.contextmanager
def {name}(model):
    """Gradients stay on their rank; the next backward outside reduces all of them."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
'''


def rewrite(plan: Plan) -> str:
    """The new text of the file."""
    return plan.file.tree.visit(_Rewriter(plan)).code


class _Rewriter(cst.CSTTransformer):
    """`new`: what the expressions of the plan have become, by the old ones."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.file = plan, plan.file
        self.new: dict[cst.CSTNode, cst.CSTNode] = {}
        self.comments: dict[cst.CSTNode, list[cst.EmptyLine]] = {}  # to be put before a statement, or at a block's end
        self.has_imported = False

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        result: Any = updated_node
        plan = self.plan
        if comments := self.comments.get(original_node):
            place = "footer" if isinstance(original_node, (cst.IndentedBlock, cst.Module)) else "leading_lines"
            updated_node = result = updated_node.with_changes(**{place: [*comments, *getattr(updated_node, place)]})
        if original_node in plan.calls:
            result = self._call(plan.calls[original_node], updated_node)
        elif original_node in plan.texts:
            result = self._expression(plan.texts[original_node])
        elif original_node in plan.functions:
            result = self._function(plan.functions[original_node], original_node, updated_node)
        elif original_node in plan.removed and isinstance(original_node, cst.SimpleStatementLine):
            return cst.RemoveFromParent()
        elif original_node in plan.wrappings:
            result = self._wrapping(plan.wrappings[original_node], updated_node)
        elif isinstance(original_node, cst.With):
            result = self._with(original_node, updated_node)
        elif isinstance(original_node, (cst.IndentedBlock, cst.Module)) and not updated_node.body:
            result = (
                updated_node.with_changes(body=[cst.parse_statement("pass")]) if original_node.body else updated_node
            )
        elif isinstance(original_node, cst.SimpleStatementLine):
            result = self._imports(original_node, updated_node)
        if isinstance(original_node, cst.Module):
            result = self._module(result)
        if isinstance(original_node, cst.BaseExpression):
            self.new[original_node] = result
        return result

    # ---- expressions ---------------------------------------------------------------------------------------------

    def _expression(self, source: Source) -> cst.BaseExpression:
        if isinstance(source, str):
            return cst.parse_expression(source, config=self.file.tree.config_for_parsing)
        if isinstance(source, Of):
            return cst.parse_expression(self._code(self._expression(source.node)) + source.suffix)
        found = self.new.get(source, source)
        assert isinstance(found, cst.BaseExpression)
        return found.deep_clone()

    def _code(self, node: cst.CSTNode) -> str:
        return self.file.tree.code_for_node(node).strip()

    def _call(self, new: NewCall, old: cst.Call) -> cst.Call:
        """In the layout of the old call; arguments that stay keep theirs."""
        args = [self._argument(part, old) for part in new.parts]
        lines = [arg.comma for arg in old.args if isinstance(arg.comma, cst.Comma)]
        between = _without_comment(lines[0]) if lines else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        args = [arg if isinstance(arg.comma, cst.Comma) else arg.with_changes(comma=between) for arg in args]
        one = len(args) == 1 and len(old.args) > 1
        if args:
            last = cst.MaybeSentinel.DEFAULT if one else old.args[-1].comma if old.args else cst.MaybeSentinel.DEFAULT
            end = cst.SimpleWhitespace("") if one or not old.args else old.args[-1].whitespace_after_arg
            args[-1] = args[-1].with_changes(comma=last, whitespace_after_arg=end)
        return old.with_changes(
            func=cst.parse_expression(new.function),
            args=args,
            whitespace_before_args=old.whitespace_before_args if args and not one else cst.SimpleWhitespace(""),
        )

    def _argument(self, part: Part, old: cst.Call) -> cst.Arg:
        value = self._expression(part.source)
        comma: Any = cst.MaybeSentinel.DEFAULT
        if isinstance(part.source, cst.BaseExpression):
            found = self.new.get(part.source)
            comma = next((arg.comma for arg in old.args[:-1] if arg.value is found), comma)
        if not part.keyword:
            return cst.Arg(value, comma=comma)
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        return cst.Arg(value, keyword=cst.Name(part.keyword), equal=equal, comma=comma)

    # ---- statements ----------------------------------------------------------------------------------------------

    def _lines(self, texts: list[str]) -> list[Any]:
        return [cst.parse_statement(text, config=self.file.tree.config_for_parsing) for text in texts]

    def _loop(self, made: Wrapping, model: str, options: str) -> list[str]:
        """The units of a policy, sharded one by one."""
        if made.units is None:
            return []
        module = self.plan.fresh("module", "submodule", "unit")
        condition = made.units.condition.replace("{module}", module).replace("{model}", model)
        modules = f"{model}.modules()"
        modules = f"reversed(list({modules}))" if made.units.inner_first or made.full_classes else modules
        indent = self.file.tree.default_indent
        cases = [(condition, f"{made.function}({module}{options})")]
        if made.full_classes:
            full = f"{module} is not {model} and isinstance({module}, {made.full_classes})"
            cases.insert(0, (full, f"{made.function}({module}{self._in_full(made, options)})"))
        lines = [f"for {module} in {modules}:\n"]
        for word, (case, call) in zip(("if", "elif"), cases, strict=False):
            lines.append(f"{indent}{word} {case}:\n{indent}{indent}{call}\n")
        return ["".join(lines)]

    def _in_full(self, made: Wrapping, options: str) -> str:
        """`options` for a unit that computes in float32, with outputs in the dtype of the others."""
        (policy,) = (self._code(self._expression(part.source)) for part in made.options if part.keyword == "mp_policy")
        if options.startswith(", **"):
            policy = f'{options.removeprefix(", **")}["mp_policy"]'
        elif not policy.isidentifier():
            policy = f"({policy})"
        full = f"{self.plan.use('MixedPrecisionPolicy')}(torch.float32, torch.float32, {policy}.param_dtype)"
        if options.startswith(", **"):
            return f', **{{{options.removeprefix(", ")}, "mp_policy": {full}}}'
        parts = [(part.keyword, self._code(self._expression(part.source))) for part in made.options]
        return "".join(f", {name}={full if name == 'mp_policy' else text}" for name, text in parts)

    def _options(self, made: Wrapping) -> tuple[list[str], str]:
        """Lines before, and the arguments of each call: by name, or as one dict where they are long."""
        parts = [(part.keyword, self._code(self._expression(part.source))) for part in made.options]
        if made.units is None or not parts:
            return [], "".join(f", {name}={text}" for name, text in parts)
        if all("(" not in text.removesuffix("()") and "{" not in text for _, text in parts):
            return [], "".join(f", {name}={text}" for name, text in parts)
        settings = self.plan.fresh("fsdp_kwargs", "shard_kwargs")
        written = ", ".join(f'"{name}": {text}' for name, text in parts)
        if len(written) > 80:
            indent = self.file.tree.default_indent
            written = "\n" + "".join(f'{indent}"{name}": {text},\n' for name, text in parts)
        return [f"{settings} = {{{written}}}"], f", **{settings}"

    def _wrapping(self, made: Wrapping, line: cst.SimpleStatementLine) -> Any:
        statement = line.body[0]
        target = self._target(statement)
        value = self._code(self._expression(made.value))
        model = made.subject
        texts: list[str] = []
        if model is None:
            model = target or self.plan.fresh("model", "sharded")
            kind = f": {self._code(statement.annotation.annotation)}" if isinstance(statement, cst.AnnAssign) else ""
            texts.append(f"{model}{kind} = {value}")
        settings, options = self._options(made)
        texts += [text.replace("{model}", model) for text in made.before] + settings + self._loop(made, model, options)
        call = f"{made.function}({model}{options})"
        returns = isinstance(statement, cst.Return)
        before = self._lines(texts)
        own: list[Any]
        if returns and made.after:
            own = self._lines([call])
        elif returns and made.subject is None:
            own = self._lines([f"return {call}"])
        elif target == model:
            own = self._own_call(made, statement, call, bool(settings) or made.subject is None)
        elif settings and target:
            own = self._lines([f"{target} = {call}"])
        else:
            own = [line.with_changes(leading_lines=[])]
        after = self._lines([text.replace("{model}", model) for text in made.after])
        after += self._lines([f"return {model}"]) if returns and made.after else []
        whole = [*before, *own, *after]
        whole[0] = whole[0].with_changes(leading_lines=line.leading_lines)
        return cst.FlattenSentinel(whole)

    def _own_call(self, made: Wrapping, statement: Any, call: str, renewed: bool) -> list[Any]:
        """`fully_shard(model, ...)` as a statement, in the layout of the old call if that fits."""
        if renewed or not isinstance(statement, cst.Assign):
            return self._lines([call])
        return [cst.SimpleStatementLine([cst.Expr(statement.value)])]

    def _target(self, statement: Any) -> str:
        if isinstance(statement, cst.AnnAssign) or (isinstance(statement, cst.Assign) and len(statement.targets) == 1):
            target = statement.target if isinstance(statement, cst.AnnAssign) else statement.targets[0].target
            return self._code(target) if isinstance(target, (cst.Name, cst.Attribute)) else ""
        return ""

    def _with(self, old: cst.With, new: cst.With) -> Any:
        """Without the items that go away; without any, its body instead."""
        left = [item for before, item in zip(old.items, new.items, strict=True) if before not in self.plan.removed]
        if len(left) == len(old.items):
            return new
        if left:
            return new.with_changes(items=[*left[:-1], left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
        body: list[Any] = list(new.body.body)
        if isinstance(new.body, cst.SimpleStatementSuite):
            body = [cst.SimpleStatementLine(body)]
        self._keep_footer(old)
        body[0] = body[0].with_changes(leading_lines=[*new.leading_lines, *body[0].leading_lines])
        return cst.FlattenSentinel(body)

    def _keep_footer(self, old: cst.With) -> None:
        """Comments at the end of a block that goes away belong to what follows it."""
        comments = [cst.EmptyLine(comment=line.comment) for line in getattr(old.body, "footer", ()) if line.comment]
        block: Any = self.file.parents[old]
        siblings = list(block.body)
        after = siblings[siblings.index(old) + 1 :]
        self.comments[after[0] if after else block] = comments

    def _function(self, made: Wrapping, old: cst.CSTNode, new: Any) -> Any:
        """A subclass that only passed settings, as a function or as another name for `fully_shard`."""
        line: Any
        if not made.function:
            (line,) = self._lines([f"{new.name.value} = fully_shard"])
            return line.with_changes(leading_lines=new.leading_lines)
        assert isinstance(old, cst.ClassDef)
        init = next(each for each in new.body.body if isinstance(each, cst.FunctionDef))
        params = init.params.with_changes(params=init.params.params[1:])
        settings, options = self._options(made)
        model = made.subject or ""
        texts = [text.replace("{model}", model) for text in made.before] + settings + self._loop(made, model, options)
        body = self._lines([*texts, f"return {made.function}({model}{options})"])
        documentation = [line for line in new.body.body if isinstance(line, cst.SimpleStatementLine)][:1]
        block = init.body.with_changes(body=[*documentation, *body])
        return init.with_changes(
            name=new.name, params=params, returns=None, body=block, leading_lines=new.leading_lines
        )

    # ---- imports -------------------------------------------------------------------------------------------------

    def _imports(self, old: cst.SimpleStatementLine, new: cst.SimpleStatementLine) -> Any:
        dropped = {name for part in old.body for name in self.plan.dropped.get(part, ())}
        if not dropped:
            return new
        first = not self.has_imported and isinstance(self.file.parents.get(old), cst.Module)
        lines: list[Any] = self._lines(self._new_imports()) if first else []
        self.has_imported = self.has_imported or first
        kept = [part for part in map(self._without(dropped), new.body) if part is not None]
        moved = [self._moved(part, dropped) for part in old.body]
        lines += self._lines([text for text in moved if text])
        lines += [new.with_changes(body=kept, leading_lines=[])] if kept else []
        if not lines:
            return cst.RemoveFromParent()
        lines[0] = lines[0].with_changes(leading_lines=new.leading_lines)
        return cst.FlattenSentinel(lines)

    def _moved(self, part: cst.CSTNode, dropped: set[str]) -> str:
        """FSDP2's names that the file had under a name of its own, or that are imported inside of a function."""
        if not isinstance(part, cst.ImportFrom) or isinstance(part.names, cst.ImportStar):
            return ""
        inside = not isinstance(self.file.parents.get(self.file.parents[part]), cst.Module)
        names = []
        for alias in part.names:
            name, shown = self._code(alias.name), alias.evaluated_alias or alias.evaluated_name
            if name in FSDP2_NAMES and shown in dropped and (inside or shown != name):
                names.append(name if shown == name else f"{name} as {shown}")
        return f"from fullshard import {', '.join(names)}" if names else ""

    def _without(self, dropped: set[str]) -> Any:
        def kept(part: Any) -> Any:
            if not isinstance(part, (cst.Import, cst.ImportFrom)) or isinstance(part.names, cst.ImportStar):
                return part
            names = [a for a in part.names if (a.evaluated_alias or a.evaluated_name) not in dropped]
            if not names:
                return None
            if len(names) < len(part.names):
                names[-1] = names[-1].with_changes(comma=part.names[-1].comma)
            return part.with_changes(names=names)

        return kept

    def _new_imports(self) -> list[str]:
        """`import` and `from` lines of what the new text uses, but for what the file has anyway."""
        wanted: dict[str, set[str]] = {}
        scope = self.file.scopes.get(self.file.tree)
        for module, name in self._needed():
            shown = name or module.partition(".")[0]
            have = {
                q.name for a in (scope[shown] if scope is not None else ()) for q in a.get_qualified_names_for(shown)
            }
            if f"{module}.{name}" not in have and (name or module not in have):
                wanted.setdefault(module, set()).add(name)
        lines = [f"import {module}" for module, names in sorted(wanted.items()) if "" in names]
        for module, names in sorted(wanted.items()):
            if names - {""}:
                lines.append(f"from {module} import {', '.join(sorted(names - {''}))}")
        return lines

    def _needed(self) -> set[tuple[str, str]]:
        """With FSDP2's names that a dropped import brought to the top of the file."""
        found = set(self.plan.imports)
        for part, dropped in self.plan.dropped.items():
            if isinstance(part, cst.ImportFrom) and not isinstance(part.names, cst.ImportStar):
                at_top = isinstance(self.file.parents.get(self.file.parents[part]), cst.Module)
                for alias in part.names if at_top else ():
                    name = self._code(alias.name)
                    if name in FSDP2_NAMES and alias.evaluated_alias is None and name in dropped:
                        found.add(("fullshard", name))
        return found

    def _module(self, module: cst.Module) -> cst.Module:
        """With what has found no place yet: imports, and helpers."""
        body = list(module.body)
        last = max((i for i, line in enumerate(body) if _is_import(line)), default=-1)
        if not self.has_imported and self._needed():
            start = last + 1 if last >= 0 else int(bool(module.get_docstring()))
            lines = self._lines(self._new_imports())
            body[start:start] = lines
            last = start + len(lines) - 1
        for name in sorted(self.plan.helpers):
            gap = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
            (helper,) = self._lines([_NO_SYNC.format(name=name)])
            body.insert(last + 1, helper.with_changes(leading_lines=gap))
            after = body[last + 2] if len(body) > last + 2 else None
            if after is not None and not any(line.comment is None for line in getattr(after, "leading_lines", ())):
                body[last + 2] = after.with_changes(leading_lines=[*gap, *after.leading_lines])
        return module.with_changes(body=body)


def _is_import(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and any(
        isinstance(p, (cst.Import, cst.ImportFrom)) for p in line.body
    )


def _without_comment(comma: cst.Comma) -> cst.Comma:
    space = comma.whitespace_after
    if isinstance(space, cst.ParenthesizedWhitespace):
        space = space.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=[])
    return comma.with_changes(whitespace_after=space)
