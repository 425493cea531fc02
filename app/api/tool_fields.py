"""The fields of a chat request about the form of its answer: functions it may call, and texts held to a schema.

Which of it a model and a route can do is found out in `answer_form`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from app.api.messages import Lenient, refuse

MAX_TOOLS = 128
MAX_DESCRIPTION = 32_768
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
MODES = ("none", "auto", "required")

Mode = Literal["none", "auto", "required"]
JsonObject = dict[str, Any]
Shape = TypeVar("Shape", bound=Lenient)


class FunctionField(Lenient):
    """A function that may be called; `parameters` is a JSON schema of its arguments."""

    name: str
    description: Annotated[str | None, Field(max_length=MAX_DESCRIPTION, repr=False)] = None
    parameters: Annotated[JsonObject | None, Field(repr=False)] = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not FUNCTION_NAME.fullmatch(name):
            raise refuse("a name has 1 to 128 letters, digits, '_', '.' and '-'")
        return name

    @field_validator("parameters")
    @classmethod
    def _are_object(cls, parameters: JsonObject | None) -> JsonObject | None:
        if parameters and parameters.get("type", "object") != "object":
            raise refuse("arguments are an object", field="type")
        return parameters


class Tool(Lenient):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionField

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, tool: Any) -> Any:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise refuse(f"{kind[:40]!a} tools are not supported", field="type", code="unsupported_parameter")
        return tool

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates know it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(Lenient):
    """One of the tools."""

    name: str


class NamedTool(Lenient):
    """One of the tools, by name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Lenient):
    """Some of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Lenient):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ToolChoice(Lenient):
    """What may be called: `names` of the tools, None for all; `is_single`: exactly one call."""

    mode: Mode
    names: tuple[str, ...] | None = None
    is_single: bool = False


def _as_choice(value: Any) -> Any:
    if value is None or isinstance(value, ToolChoice):
        return value
    if isinstance(value, str):
        if value not in MODES:
            raise refuse("it is 'none', 'auto', 'required' or an object")
        return {"mode": value}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        named = _valid(NamedTool, value)
        return {"mode": "required", "names": (named.function.name,), "is_single": True}
    if kind == "allowed_tools":
        allowed = _valid(AllowedChoice, value).allowed_tools
        return {"mode": allowed.mode, "names": tuple(tool.function.name for tool in allowed.tools)}
    if kind == "custom":
        raise refuse("custom tools are not supported", field="type", code="unsupported_parameter")
    raise refuse("it is 'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'")


def _valid(shape: type[Shape], value: Any) -> Shape:
    """Read one of the shapes of a choice; its wrong field is named, not its value."""
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise refuse(first["msg"], field=".".join(map(str, first["loc"])) or "type") from None


class JsonSchemaField(Lenient):
    """A schema that the answer is held to; it is, whether `strict` says so or not."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = Field(default=None, repr=False)
    schema_: Annotated[JsonObject | None, Field(alias="schema", repr=False)] = None
    strict: bool | None = None


class ResponseFormat(Lenient):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaField | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in ("text", "json_object", "json_schema"):
            raise refuse("it is 'text', 'json_object' or 'json_schema'", field="type")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refuse("it is missing", field="json_schema")
        return self


class FormFields(Lenient):
    """What a chat request says about the form of its answer; None means the default everywhere."""

    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[
        ToolChoice | None,
        BeforeValidator(_as_choice, json_schema_input_type=Mode | NamedTool | AllowedChoice | None),
    ] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_fits(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise refuse(f"{name[:40]!a} is there twice", field=f"tools.{number}.function.name")
        choice = self.tool_choice
        if choice is None or choice.mode == "none":
            return self
        if not names and (choice.mode == "required" or choice.names):
            raise refuse("it needs tools to choose from", field="tool_choice")
        for name in choice.names or ():
            if name not in names:
                raise refuse(f"{name[:40]!a} is none of the tools", field="tool_choice")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        choice = self.tool_choice
        if choice is None:
            return self.tools or []
        if choice.mode == "none":
            return []
        return [
            tool for tool in self.tools or () if choice.names is None or tool.function.name in choice.names
        ]

    @property
    def must_call(self) -> bool:
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def most_calls(self) -> int | None:
        """How many calls there may be; None: any number."""
        is_single = self.tool_choice is not None and self.tool_choice.is_single
        return 1 if is_single or self.parallel_tool_calls is False else None
