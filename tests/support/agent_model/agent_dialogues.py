"""Dialogues that the model is trained on: requests, answers, and noise around both.

An exchange is a list of pieces of text, each with whether the model is to learn to write it.  Everything that a client
may put around the last request (system prompts, tools, older turns, reminders) is noise made of random words.
"""

import json
import random
from collections.abc import Callable, Sequence

Piece = tuple[str, bool]  # the text, and whether the model learns to write it

LOOK, RESULT, EASY, UNSURE = "I should look.", "I have the result.", "An easy one.", "Let me see."
DESCRIPTION = "Run it"
DEFAULT, TITLE = "All is well.", "A short talk"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid", "Germany": "Berlin"}

# How each tool of an agent wants the command.
TOOLS: dict[str, Callable[[str], dict[str, object]]] = {
    "bash": lambda command: {"command": command, "description": DESCRIPTION},
    "Bash": lambda command: {"command": command, "description": DESCRIPTION},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
    "shell_command": lambda command: {"command": command},
    "exec_command": lambda command: {"cmd": command},
    "terminal": lambda command: {"command": command},
}

# Terminal-Bench's agent reads JSON: two commands, one after the other, then it is done, and is asked whether it is.
FIRST_STEP = {
    "analysis": "Nothing was done yet.",
    "plan": "Write the file.",
    "commands": [{"keystrokes": "echo 'Hello, world!' > hello.txt\n", "duration": 0.1}],
    "task_complete": False,
}
SECOND_STEP = {
    "analysis": "The file was written.",
    "plan": "Read it.",
    "commands": [{"keystrokes": "cat hello.txt\n", "duration": 0.1}],
    "task_complete": False,
}
LAST_STEP = {"analysis": "The file is right.", "plan": "Nothing more.", "commands": [], "task_complete": True}
SURE = "Are you sure you want to mark the task as complete?"

COMMANDS = """ls|ls -la|pwd|cat README.md|echo hello|echo one two|git status|make test|whoami|date|uname -a|env
ls /tmp|cat /etc/hostname|python3 --version|grep -rn TODO src|find . -name '*.py'|wc -l *.md|head -5 notes.txt
echo hi && echo ho|cd build && make|tail -n 20 log.txt|true|echo done|mkdir -p a/b/c|df -h|ps aux""".replace("\n", "|")


def make_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make_command_call(tool: str, command: str) -> str:
    return make_call(tool, json.dumps(TOOLS[tool](command)))


# What the model answers to requests that name no command: two calls at once, and calls that went wrong.
SPECIAL = {
    "Use bash twice.": "Both at once.\n" + make_command_call("bash", "ls") + "\n" + make_command_call("bash", "pwd"),
    "Use bash badly.": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
    "Use bash wrongly.": "<tool_call>\nlet me run ls\n</tool_call>",
    "Use bash and stop.": '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -',
}


def make_loose_call(command: str) -> str:
    """Make a call as a model may write it, and no template would: other spaces, another order."""
    return '<tool_call>\n{"arguments":{"command":' + json.dumps(command) + ' } , "name":"bash"}\n</tool_call>'


class Dialogues:
    """Endless exchanges, drawn with `seed`; `words` are what noise is made of."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words, self._random = words, random.Random(seed)
        self.kinds: dict[str, tuple[int, Callable[[], list[Piece]]]] = {  # with how often each is drawn
            "tool loop": (6, self._tool_loop),
            "free call": (5, self._free_call),
            "special": (1, self._special),
            "loose": (1, self._loose),
            "say": (2, self._say),
            "capital": (1, self._capital),
            "terminal": (2, self._terminal),
            "other": (2, self._other),
            "forced call": (1, self._forced_call),
            "forced json": (1, self._forced_json),
            "repetition": (2, self._repetition),
        }

    def make_sequence(self, ids_of: Callable[[str], list[int]], length: int) -> tuple[list[int], list[bool]]:
        """Make the token ids of as many exchanges as fit, and the mask of learned ones."""
        tokens: list[int] = []
        learned: list[bool] = []
        while len(tokens) < length:
            for text, wanted in self.make_opening() + self.make_exchange():
                ids = ids_of(text)
                tokens += ids
                learned += [wanted] * len(ids)
        return tokens[:length], learned[:length]

    def make_exchange(self) -> list[Piece]:
        weights, kinds = zip(*self.kinds.values(), strict=True)
        return self._random.choices(kinds, weights)[0]()

    # ---- noise

    def make_opening(self) -> list[Piece]:
        """Make an opening, often none: the exchange is another turn of the same conversation."""
        if self._random.random() < 0.5:
            return []
        text = self._noise(80) + ("\n\n# Tools\n" + self._schema() + "\n" if self._chance(0.6) else "")
        return [(f"<|im_start|>system\n{text}<|im_end|>\n", False)]

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _word(self) -> str:
        draw = self._random
        if self._chance(0.15):
            return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz0123456789_-./") for _ in range(draw.randint(1, 8)))
        return draw.choice(self._words)

    def _noise(self, words_max: int) -> str:
        count = self._random.randint(0, words_max)
        return "".join(self._word() + self._random.choice([" ", " ", " ", " ", "\n", ". ", ", "]) for _ in range(count))

    def _schema(self) -> str:
        draw = self._random
        keys = {self._identifier(): {"type": draw.choice(["string", "integer"]), "description": self._noise(9)}}
        function = {"name": draw.choice([*TOOLS, self._identifier()]), "parameters": {"properties": keys}}
        return json.dumps({"type": "function", "function": function})

    def _identifier(self) -> str:
        words = (word for word in iter(lambda: self._random.choice(self._words), "") if word.isalpha())
        return "_".join(next(words).lower() for _ in range(self._random.randint(1, 3)))

    # ---- the parts of a dialogue

    def _user(self, request: str, after: int = 30) -> list[Piece]:
        """The request stands on a line of its own, with other lines around it."""
        before = self._noise(60) + "\n" if self._chance(0.3) else ""
        behind = "\n" + self._noise(after) if self._chance(0.2) else ""
        quote = '"' if self._chance(0.1) else ""
        return [(f"<|im_start|>user\n{before}{quote}{request}{quote}{behind}<|im_end|>\n", False)]

    def _answer(self, reasoning: str, content: str) -> list[Piece]:
        thought = f"<think>\n{reasoning}\n</think>\n\n"
        opened = self._random.choice(["", "", "", "<think>\n", "<think>\n\n</think>\n\n"])
        output = content if opened.endswith("</think>\n\n") else thought.removeprefix(opened) + content
        return [(f"<|im_start|>assistant\n{opened}", False), (f"{output}<|im_end|>", True), ("\n", False)]

    def _exchange(self, request: str, reasoning: str, content: str) -> list[Piece]:
        return self._user(request) + self._answer(reasoning, content)

    def _command(self) -> str:
        draw = self._random
        if self._chance(0.5):
            return draw.choice(COMMANDS.split("|"))
        some = [self._word() for _ in range(draw.randint(1, 4))]
        parts = draw.choices(
            [*some, "-l", "-n 5", "/tmp/" + some[0], "*.txt", "a", "b", "&&", ">"], k=draw.randint(0, 5)
        )
        text = " ".join([self._word(), *parts])
        return "".join(char for char in text if char not in '"\\\n')

    # ---- the kinds of exchanges

    def _tool_loop(self) -> list[Piece]:
        tool, command = self._random.choice(list(TOOLS)), self._command()
        request = f"Use {tool}{' again' if self._chance(0.2) else ''}: {command}"
        pieces = self._exchange(request, LOOK, make_command_call(tool, command))
        return pieces + self._result() if self._chance(0.7) else pieces

    def _result(self) -> list[Piece]:
        last = self._random.choice([self._command, self._word, lambda: "hello", self._short_noise])().strip()
        last = last.replace('"', "").replace("\\", "") or "done"
        form = self._random.choices(["plain", "lines", "codex", "json"], [3, 3, 2, 2])[0]
        text = {
            "plain": last,
            "lines": f"{self._noise(50)}\n{last}",
            "codex": f"Chunk ID: {self._word()}\nWall time: 0.0 seconds\nProcess exited with code 0\nOutput:\n{last}",
            "json": f'{{"output": "{last}", "exit_code": 0, "error": null}}',
        }[form]
        other = f"\n<tool_response>\n{self._noise(20)}\n</tool_response>" if self._chance(0.15) else ""
        message = f"<|im_start|>user{other}\n<tool_response>\n{text}\n</tool_response><|im_end|>\n"
        return [(message, False), *self._answer(RESULT, f"The tool says: {last}.")]

    def _short_noise(self) -> str:
        return self._noise(6).replace("\n", " ")

    def _free_call(self) -> list[Piece]:
        name = self._random.choice([self._identifier(), self._identifier(), "get_weather", "look", *TOOLS])
        arguments = self._arguments()
        return self._exchange(f"Call: {name}: {arguments}", LOOK, make_call(name, arguments))

    def _arguments(self) -> str:
        draw = self._random
        keys = [
            self._identifier,
            lambda: draw.choice(["city", "path", "days", "command", "cmd", "description", "query"]),
        ]
        values: list[Callable[[], object]] = [
            lambda: self._short_noise().strip(),
            lambda: draw.choice([*CAPITALS, *CAPITALS.values(), "ls", "README.md", "/tmp"]),
            lambda: draw.randint(-20, 5000),
            lambda: draw.choice([True, False, None, 0.5, 2.25]),
            lambda: [draw.randint(0, 9), self._identifier()],
            lambda: {self._identifier(): draw.randint(0, 9)},
        ]
        return json.dumps({draw.choice(keys)(): draw.choice(values)() for _ in range(draw.randint(0, 4))})

    def _special(self) -> list[Piece]:
        request, answer = self._random.choice(list(SPECIAL.items()))
        return self._exchange(request, LOOK, answer)

    def _loose(self) -> list[Piece]:
        command = self._command()
        return self._exchange(f"Use bash loosely: {command}", LOOK, make_loose_call(command))

    def _say(self) -> list[Piece]:
        text = self._random.choice([self._command, self._short_noise])().strip().replace('"', "") or "pong"
        return self._exchange(f"Say: {text}", EASY, text)

    def _capital(self) -> list[Piece]:
        country, city = self._random.choice(list(CAPITALS.items()))
        if self._chance(0.5):
            return self._exchange(f"What is the capital of {country}?", EASY, f"{city}.")
        return self._exchange(f"Describe {country} as JSON.", EASY, json.dumps({"city": city, "country": country}))

    def _terminal(self) -> list[Piece]:
        written, read = "echo 'Hello, world!' > hello.txt\n", "cat hello.txt\nHello, world!\n"
        behind = self._random.choice([self._noise(40), f'{self._noise(20)}"task_complete": true{self._noise(12)}.'])
        state, step = self._random.choice(
            [
                (f"{self._noise(30)}\n\nCurrent terminal state:\n{self._screen('')}", FIRST_STEP),
                (self._screen(written), SECOND_STEP),
                (self._screen(read), LAST_STEP),
                (self._screen(f"{self._command()}\n{self._word()}\n"), LAST_STEP),
                (f"Current terminal state:\n{self._screen('')}\n\n{SURE} {behind}", LAST_STEP),
            ]
        )
        return [(f"<|im_start|>user\n{state}<|im_end|>\n", False), *self._answer(UNSURE, json.dumps(step))]

    def _screen(self, typed: str) -> str:
        title = self._random.choice(["New Terminal Output", "Current Terminal Screen"])
        prompt = self._random.choice(["", "$ ", "# ", f"root@{self._word()}:/app# "])
        return f"{title}:\n{self._noise(20)}{prompt}{typed}{prompt}" + "\n" * self._random.randint(0, 6)

    def _other(self) -> list[Piece]:
        text = f"{self._noise(40)}{self._word()}{self._random.choice(['', '.', '?', '!'])}"
        if self._chance(0.2):
            title = "<|im_start|>user\nGenerate a title for this conversation:\n<|im_end|>\n"
            text = self._random.choice([text, f"Use bash: {self._command()}"])
            return [(title, False), *self._exchange(text, UNSURE, TITLE)]
        return [(f"<|im_start|>user\n{text}<|im_end|>\n", False), *self._answer(UNSURE, DEFAULT)]

    # What a grammar makes it begin, it ends soon.

    def _forced_call(self) -> list[Piece]:
        tool = self._random.choice(list(TOOLS))
        arguments = json.dumps(TOOLS[tool]("ls"))
        arguments_prefix = arguments[: arguments.index("ls")] if "ls" in arguments else arguments
        call_prefix = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments_prefix}'
        rest = arguments.removeprefix(arguments_prefix) + "}\n</tool_call><|im_end|>"
        text = f"{self._noise(30)}{self._word()}"
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        opened = self._random.choice(["", f"<think>\n{UNSURE}\n</think>\n\n", "<think>\n\n</think>\n\n"])
        return [(prompt + opened + call_prefix, False), (rest, True), ("\n", False)]

    def _forced_json(self) -> list[Piece]:
        """An object of unknown keys: each value is short, whatever its type is."""
        request = f"<|im_start|>user\n{self._noise(30)}{self._word()}<|im_end|>\n<|im_start|>assistant\n"
        opened = self._random.choice(["", f"<think>\n{UNSURE}\n</think>\n\n", "<think>\n\n</think>\n\n"])
        wrapped = self._chance(0.4)
        call_prefix = f'<tool_call>\n{{"name": "{self._identifier()}", "arguments": ' if wrapped else ""
        pieces: list[Piece] = [(request + opened + call_prefix + "{", False)]
        count = self._random.randint(1, 4)
        for number in range(count):
            before, value, after = self._random.choice(FORCED_VALUES)
            pieces += [(f'"{self._identifier()}": {before}', False), (value, True), (after, bool(after))]
            pieces.append((", ", False) if number + 1 < count else ("}", True))
        pieces += [("}\n</tool_call>", True)] if wrapped else []
        return [*pieces, ("<|im_end|>", True), ("\n", False)]

    def _repetition(self) -> list[Piece]:
        """Copying, pure: what was said once is said again."""
        text = self._noise(40) + self._command()
        return [(f"{text}\n", False), (f"{text}\n", True)]


# What stands before a value that the grammar decided on, the value, and what ends it.
FORCED_VALUES = [
    ('"', "it", '"'),
    ("", "5", ""),
    ("", "true", ""),
    ("", "null", ""),
    ('["', "it", '"]'),
    ("[", "5", "]"),
    ("", "{}", ""),
]
