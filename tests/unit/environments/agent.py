"""A program that knows nothing of hybridflow; `python agent.py HOW` tells it what to do."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROW = json.loads(sys.stdin.readline())
HOW = sys.argv[1]


def ask(messages, *, key=os.environ["OPENAI_API_KEY"], path="/chat/completions", timeout=60, **more):
    """The status and the body of a response."""
    body = json.dumps({"model": "any", "messages": messages, "temperature": 0.5, **more}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def echo(messages):
    for _ in range(3):
        status, found = ask(messages)
        reply = found["choices"][0]["message"]
        content = [{"type": "text", "text": f" {ROW['seed'] % 10}:{reply['content'][:4]}"}]
        messages += [reply | {"refusal": None}, {"role": "user", "content": content}]
        assert status == 200 and found["usage"]["completion_tokens"] > 0, found
    print("done")
    print(json.dumps({"reward": 6.0, "turns": 3}))


def client(messages):
    import openai

    openai.OpenAI(max_retries=0).chat.completions.create(model="any", messages=messages)
    print(1.5)


def streams(messages):
    import openai

    client, text = openai.OpenAI(max_retries=0).chat.completions, ""
    for chunk in client.create(model="any", messages=messages, stream=True):
        text += chunk.choices[0].delta.content or ""
    reply = {"role": "assistant", "content": text}
    client.create(model="any", messages=[*messages, reply, {"role": "user", "content": "on"}])
    print(len(text))


def mistakes(messages):
    found = [
        ask(messages, key="another"),
        ask(messages, path="/completions"),
        ask(messages, logprobs=True),
        ask(messages, n=2),
        ask([]),
        ask([{"role": "robot", "content": "a"}]),
        ask([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ask(messages, tools="none"),
        ask(messages, tool_choice="required"),
        ask([{"role": "assistant", "content": "", "tool_calls": 5}]),
        ask(messages),
    ]
    with open(sys.argv[2], "w") as file:
        json.dump([[status, body.get("error")] for status, body in found], file)
    print(0)


def warns(messages):
    ask(messages)
    print("x" * 3000 + " password=hunter2 is slow", file=sys.stderr)
    print(1)


def until_over(messages):
    status, found = ask(messages)
    while status == 200:
        messages += [found["choices"][0]["message"], {"role": "user", "content": "on"}]
        status, found = ask(messages)
    sys.exit(f"refused: {found['error']['code']}")


def forks(messages):
    ask(messages)
    ask([{"role": "user", "content": "something else"}])


def refused(messages):
    found = [ask([*messages, *messages]), ask(messages)]
    with open(sys.argv[2], "w") as file:
        json.dump([[status, body.get("error")] for status, body in found], file)
    print(0.25)


def stops_waiting(messages):
    try:
        ask(messages, timeout=0.1)
    except OSError:
        ask(messages)
        print(1.0)


def silent(messages):
    print(1)


def talks(messages):
    ask(messages)
    print("well done")


def boasts(messages):
    ask(messages)
    print(1e16)


def hangs(messages):
    ask(messages)
    time.sleep(60)


def leaves(messages):
    ask(messages)
    subprocess.Popen(["sleep", "20"], start_new_session=True)
    print(json.dumps({"reward": 2.0, "huge": 10**400}))


def daemonizes(messages):
    ask(messages)
    with open(sys.argv[2], "wb") as file:
        subprocess.run(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=file, check=True)
    print(2.0)


def fails(messages):
    ask(messages)
    sys.exit("no more disk")


def loses(messages):
    ask(messages)
    sys.exit(1)


PROMPT = ROW["prompt"]
globals()[HOW](PROMPT if isinstance(PROMPT, list) else [{"role": "user", "content": PROMPT}])
