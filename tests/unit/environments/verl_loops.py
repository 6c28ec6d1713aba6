"""A tool, an agent loop that calls it, and an agent loop without tools, as users of verl write them."""

from verl.experimental.agent_loop.agent_loop import ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

PARAMETERS = {
    "type": "object",
    "properties": {"answer": {"type": "string", "description": "The answer."}},
    "required": ["answer"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "grade", "description": "Grades an answer.", "parameters": PARAMETERS},
}


class Length(BaseTool):
    """Rewards the length of the answer."""

    async def create(self, instance_id=None, **kwargs):
        self.found, self.add = 0, kwargs.get("add", 0)
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        self.found = len(parameters["answer"]) + self.add
        return ToolResponse(text=f"{self.found} characters"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.found)


class Grades(ToolAgentLoop):
    """verl's agent loop with the tool."""

    def __init__(self, *args, **kwargs):
        tool = Length({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
        super().__init__(*args, tools=ToolListWrap([tool]), **kwargs)


class Answers(SingleTurnAgentLoop):
    """verl's agent loop of one turn."""
