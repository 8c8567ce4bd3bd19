"""An engine that says what a test gives it, at the boundary that the command line sees."""

import dataclasses
import types

from ling3.engine.outputs import Completion, Delta, Logprob, RequestOutput, Timings

END = 1


@dataclasses.dataclass
class Script:
    """What the engines of one test say, and what they were asked."""

    texts: tuple[str, ...]
    """The answers, in the order of the requests, over and over."""
    end: bool = True
    """Whether they end by themselves, and not with the tokens that there were to be."""
    size: int = 4
    """Tokens of a step."""
    error: str | None = None
    """What the first request ends with after its first step."""
    interrupt: BaseException | None = None
    """Raised once, by an engine's second step."""
    settings: list = dataclasses.field(default_factory=list)
    prompts: list = dataclasses.field(default_factory=list)
    params: list = dataclasses.field(default_factory=list)
    engines: list = dataclasses.field(default_factory=list)

    def engine(self, model, tokenizer, settings):
        """In the place of `ling3.serve.Engine`."""
        self.settings.append(settings)
        self.engines.append(ScriptedEngine(self, model, tokenizer, settings))
        return self.engines[-1]


@dataclasses.dataclass
class Saying:
    rest: list[int]
    decoder: object
    prompt: list[int]
    params: object
    said: list[int] = dataclasses.field(default_factory=list)
    text: str = ""


class ScriptedEngine:
    def __init__(self, script, model, tokenizer, settings):
        self.script, self.model, self.tokenizer = script, model, tokenizer
        self.max_model_len = settings.max_model_len
        self.steps, self.aborted, self.warm = 0, 0, False

    def warmup(self, first_token=False):
        self.warm = True

    def stats(self):
        return types.SimpleNamespace(compile_seconds=0.0)

    def stream(self, prompt, params, *, truncate=None):
        deltas = self.stream_all([prompt], [params], truncate=truncate)
        return (delta for _, delta in deltas)

    def stream_all(self, prompts, params, *, truncate=None):
        assert self.warm, "the first token is not to wait for what else is compiled"
        return self._stream([self._asked(*each, truncate) for each in zip(prompts, params, strict=True)])

    def _asked(self, prompt, params, truncate):
        script = self.script
        number = len(script.prompts)
        room = self.max_model_len - len(prompt)
        params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room)) if truncate else params
        assert params.max_tokens <= room
        ids = [*self.tokenizer.encode(script.texts[number % len(script.texts)]), *([END] if script.end else [])]
        script.prompts.append(prompt)
        script.params.append(params)
        return number, Saying(ids[: params.max_tokens], self.tokenizer.stream(prompt), prompt, params)

    def _stream(self, asked):
        running = dict(enumerate(asked))
        try:
            while running:
                self.steps += 1
                if self.script.interrupt is not None and self.steps == 2:
                    error, self.script.interrupt = self.script.interrupt, None
                    raise error
                for index, (number, saying) in list(running.items()):
                    delta = self._step(number, saying)
                    if delta.output is not None:
                        del running[index]
                    yield index, delta
        finally:
            self.aborted += len(running)

    def _step(self, number, saying):
        new, saying.rest = saying.rest[: self.script.size], saying.rest[self.script.size :]
        reason = None if saying.rest else "stop" if [*saying.said, *new][-1:] == [END] else "length"
        if self.script.error is not None and number == 0:
            reason = "error"
        text = saying.decoder.feed([token for token in new if token != END])
        text += "" if reason is None else saying.decoder.flush()
        saying.said, saying.text = saying.said + new, saying.text + text
        output = None
        if reason is not None:
            logprobs = None
            if saying.params.logprobs is not None:
                logprobs = [Logprob(token, -0.5, {token: -0.5, 0: -1.0}) for token in saying.said]
            error = self.script.error if reason == "error" else None
            timings = Timings(0.0, 0.0, None, 0.0, 0)
            completion = Completion(0, saying.text, saying.said, logprobs, reason, None, error, 0, timings)
            output = RequestOutput(number, None, saying.prompt, [completion])
        return Delta(number, 0, text, new, None, reason, output)
