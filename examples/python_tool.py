"""An environment: the model may run Python code, and is rewarded for a correct answer.

    trainer: {trainer_type: grpo, environment: examples/python_tool.py:PythonTool}

A message with a block of Python code is a call: the code runs in a sandbox, and the model reads the
output. Another message is the answer, which is compared with the field `answer` of the row.
"""

import re

from ed_trainers.environments import EnvironmentReply, Sandbox

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


class PythonTool:
    """One question with at most `CALLS` calls."""

    CALLS = 3

    def reset(self, messages, row):
        """Begin a question."""
        self.answer, self.calls = str(row.get("answer", "")).strip(), 0
        self.sandbox = Sandbox(seconds=2.0, memory=2**28, output=2000)

    def step(self, messages):
        """Run the code of the newest message, or compare its answer."""
        text = messages[-1]["content"]
        code = CODE.search(text)
        if code is None or self.calls == self.CALLS:
            return EnvironmentReply(reward=float(self.answer in text), done=True)
        self.calls += 1
        result = self.sandbox.python(code.group(1))
        output = result.output
        if result.stopped_by is not None:
            output += f"\n[stopped by the limit of {result.stopped_by}]"
        return EnvironmentReply([{"role": "tool", "content": output}])
