"""What is kept of an example that is longer than data.max_length."""

from __future__ import annotations


def prompt_room(prompt: int, longest: int, max_length: int) -> int:
    """Tokens that a prompt of so many is given beside the longest completion: at least a quarter of max_length."""
    return max(max_length - longest, min(prompt, max(1, max_length // 4)))


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut).

    The prompt is cut first, at its beginning (the last question is at its end), except for a leading BOS, without
    which many models fail. A quarter of max_length is kept for it: a completion longer
    than the rest is cut at its end, and then has no end token, because it does not end there. All completions
    of an example share one prompt.
    """
    longest = max(map(len, completions))
    if len(prompt) + longest <= max_length:
        return prompt, completions, False
    kept = prompt_room(len(prompt), longest, max_length)
    if kept < len(prompt):
        has_bos = prompt[0] == bos_token_id
        prompt = prompt[:has_bos] + prompt[len(prompt) - kept + has_bos :]
    return prompt, [completion[: max_length - kept] for completion in completions], True
