"""Agent loops as users of verl write them, in the form that it documents."""

from types import SimpleNamespace
from uuid import uuid4


class AgentLoopBase:
    """With the arguments of verl's class of this name."""

    def __init__(
        self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, hf_model_type, **kwargs
    ):
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.data_config = data_config.config
        assert self.data_config.get("apply_chat_template_kwargs", {}) == {} and not kwargs

    async def generate(self, prompt_ids, **named):
        return await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params={"temperature": 0.5}, **named
        )


def output(prompt_ids, response_ids, response_mask, **named):
    """As verl's `AgentLoopOutput`."""
    plain = {"response_logprobs": None, "reward_score": None, "num_turns": 2, "metrics": {}, "extra_fields": {}}
    tokens = {"prompt_ids": prompt_ids, "response_ids": response_ids, "response_mask": response_mask}
    return SimpleNamespace(**tokens, **(plain | named))


class TwoTurns(AgentLoopBase):
    """Two replies with a text between them; `after` changes what it returns."""

    def __init__(self, *args, text=" again", **kwargs):
        super().__init__(*args, **kwargs)
        self.text, self.limit = text, self.rollout_config.response_length

    def after(self, ids, mask):
        return ids, mask

    async def run(self, sampling_params, **kwargs):
        (message,) = kwargs["raw_prompt"]
        prompt_ids = ids = self.tokenizer.encode(message["content"])
        mask = []
        for turn in range(2):
            if turn:
                added = self.tokenizer.encode(self.text, add_special_tokens=False)
                ids, mask = ids + added, mask + [0] * len(added)
            reply = await self.generate(ids)
            assert len(reply.token_ids) == len(reply.log_probs) and reply.extra_fields == {}
            ids, mask = ids + reply.token_ids, mask + [1] * len(reply.token_ids)
        response_ids, mask = self.after(ids[len(prompt_ids) :], mask)
        extra = {"turn_scores": [0.5], "kind": kwargs["kind"], "reward_extra_info": {"acc": 0.25}}
        return output(
            prompt_ids,
            response_ids[: self.limit],
            mask[: self.limit],
            reward_score=0.75,
            num_turns=4,
            extra_fields=extra,
        )


class Continues(TwoTurns):
    """Tokens after the last reply are not trained on."""

    def after(self, ids, mask):
        return [*ids, 5, 6], [*mask, 0, 0]


class MasksTheFirst(TwoTurns):
    """Only the second reply is trained on."""

    def after(self, ids, mask):
        second = mask.index(0)
        return ids, [0] * second + mask[second:]


class StopsEarly(TwoTurns):
    """It returns the first two tokens."""

    def after(self, ids, mask):
        return ids[:2], mask[:2]


class MasksAll(TwoTurns):
    """Nothing is trained on."""

    def after(self, ids, mask):
        return ids, [0] * len(ids)


class EncodesAgain(TwoTurns):
    """It changes a sampled token, as encoding a reply again does."""

    def after(self, ids, mask):
        return [ids[0] + 1, *ids[1:]], mask


class TrainsObservations(TwoTurns):
    """Its mask is 1 for the text between the replies."""

    def after(self, ids, mask):
        return ids, [1] * len(ids)


class ShortMask(TwoTurns):
    """Its mask is too short."""

    def after(self, ids, mask):
        return ids, mask[:-1]


class Fractions(TwoTurns):
    """Its mask has weights."""

    def after(self, ids, mask):
        return ids, [0.5 * one for one in mask]


class Text(TwoTurns):
    """It returns text in place of token ids."""

    def after(self, ids, mask):
        return "23", [1, 1]


class TakesTheFirst(AgentLoopBase):
    """Two replies to the same prompt, of which the first is trained on."""

    async def run(self, sampling_params, raw_prompt, **kwargs):
        prompt_ids = self.tokenizer.encode(raw_prompt[0]["content"])
        first, second = await self.generate(prompt_ids), await self.generate(prompt_ids)
        assert first.token_ids != second.token_ids
        return output(prompt_ids, first.token_ids, [1] * len(first.token_ids), reward_score=1.0)


class Endless(AgentLoopBase):
    """It never ends."""

    async def run(self, sampling_params, raw_prompt):
        ids = self.tokenizer.encode(raw_prompt[0]["content"])
        while True:
            ids = ids + (await self.generate(ids)).token_ids


class Fails(AgentLoopBase):
    """Misuse, which the column `how` chooses."""

    async def run(self, sampling_params, how, **kwargs):
        if how == "vocabulary":
            await self.generate([2, 10**6])
        if how == "empty":
            await self.generate([])
        if how == "image":
            await self.generate([2, 3], image_data=["an image"])
        if how == "setting":
            return self.config.trainer
        if how == "nothing":
            await self.generate([2, 3])
            return None
        return output([2, 3], [4], [1])
