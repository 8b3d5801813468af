"""A judge behind HTTP, such as a language model behind an OpenAI-like API, as an async reward function."""

import asyncio
import datetime
import email.utils
import logging
import math
import numbers
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import torch


logger = logging.getLogger(__name__)

# Worth another try, as is all from 500 on: the judge is overloaded or restarting. Any other error status means that
# the request is wrong.
RETRY_STATUSES = frozenset({408, 425, 429})
# A judge that asks to be left alone for longer is asked again after this time.
MAX_RETRY_AFTER_SECONDS = 60.0
# What reading a reply raises if it is no JSON, or JSON of another form than `verdict` expects.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class HTTPJudge:
    """Reward function that asks a judge over HTTP about each completion, several at a time.

    ```python
    judge = HTTPJudge(
        "http://localhost:8000/v1/chat/completions",
        request=lambda prompt, completion, **columns: {"model": "judge", "messages": [...]},
        verdict=lambda response: float("yes" in response["choices"][0]["message"]["content"].lower()),
    )
    ```

    Args:
        url: Where to POST.
        request: Makes the JSON body of one request from prompt, completion and the dataset's further columns of that
            row.
        verdict: Makes a reward, or None for no verdict, from the JSON of the answer. A reply on which it raises a
            KeyError, IndexError, TypeError, ValueError or AttributeError is malformed, as is one that is no JSON or
            that it makes anything but a finite number of.
        headers: HTTP headers, such as an authorization. A key is better here than in the url, which httpx logs (INFO).
        max_concurrency: Requests under way at one time.
        timeout: Limit of one try, in seconds, from connecting to the last byte of the reply.
        total_timeout: Limit of one request, in seconds: of all its tries and the waits between them.
        max_retries: Further tries after a failed connection or a status such as 429 or 503. After a malformed reply
            there is none.
        backoff: Seconds before the first further try; doubled for each one after it, and spread at random so that
            requests do not all come back at once. A `Retry-After` of the judge wins, up to 60 seconds.
        name: Name in metrics.

    Raises:
        ValueError: A number is out of range, or a header cannot be sent.
    """

    def __init__(
        self,
        url: str,
        request: Callable[..., dict[str, Any]],
        verdict: Callable[[Any], float | None],
        headers: dict[str, str] | None = None,
        max_concurrency: int = 16,
        timeout: float = 60.0,
        max_retries: int = 3,
        backoff: float = 1.0,
        name: str = "http_judge",
        total_timeout: float = 300.0,
    ):
        if max_concurrency < 1 or min(timeout, total_timeout) <= 0 or max_retries < 0:
            raise ValueError(
                "HTTPJudge needs max_concurrency >= 1, timeout > 0, total_timeout > 0 and max_retries >= 0, not "
                f"{max_concurrency}, {timeout}, {total_timeout} and {max_retries}."
            )
        for header, value in (headers or {}).items():
            # The errors of httpx would show the value.
            if not value.isascii() or not value.isprintable() or value != value.strip():
                raise ValueError(
                    f"HTTPJudge cannot send the header {header!r}: its value (not shown, {len(value)} characters) "
                    "must be printable ASCII without white space at its ends, such as a line's end read from a file."
                )
        self.__name__ = name
        self.url, self.request, self.verdict, self.headers = url, request, verdict, headers
        self.max_concurrency, self.timeout, self.total_timeout = max_concurrency, timeout, total_timeout
        self.max_retries, self.backoff = max_retries, backoff

    async def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence | None = None,
        trainer_state: Any = None,
        log_extra: Callable | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        agent: str | None = None,
        **columns: Sequence,
    ) -> list[float | None]:
        """Verdicts on a batch of completions.

        None where the judge gave none: it could not be reached, had a fault of its own (a status from 500 on), did not
        reply in time, or its reply was malformed. That is counted in `{name}/failures`, and logged once a batch.

        Raises:
            httpx.HTTPStatusError: The judge refuses a request for good (a status such as 400, 401 or 404).
        """
        rows = enumerate(zip(prompts, completions, strict=True))
        bodies = [self.request(*pair, **{key: columns[key][i] for key in columns}) for i, pair in rows]
        slots = asyncio.Semaphore(self.max_concurrency)
        # Each try has a limit of its own. Those of httpx are on the time between two parts of a reply.
        limits = httpx.Limits(max_connections=self.max_concurrency)
        async with httpx.AsyncClient(headers=self.headers, timeout=None, limits=limits) as client:
            answers = await asyncio.gather(*(self._ask(client, slots, body) for body in bodies))
        failures = [answer.reason for answer in answers if isinstance(answer, _Failure)]
        if failures:
            logger.warning(
                f"{self.__name__}: {len(failures)} of {len(answers)} completions got no verdict from "
                f"{self._shown_url()}. The first reason: {self._without_keys(failures[0])[:300]}."
            )
        if log_metric is not None:
            log_metric(f"{self.__name__}/failures", float(len(failures)))
        return [None if isinstance(answer, _Failure) else answer for answer in answers]

    async def _ask(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, body: dict) -> Any:
        """The verdict on one request, or a `_Failure`."""
        time = asyncio.get_running_loop().time
        end, reason = math.inf, ""
        for attempt in range(self.max_retries + 1):
            wait = self.backoff * 2**attempt * random.uniform(0.5, 1.5)
            async with slots:
                if attempt == 0:
                    end = time() + self.total_timeout  # the wait for other requests does not count
                seconds = min(self.timeout, end - time())
                if seconds <= 0:
                    break
                try:
                    async with asyncio.timeout(seconds):
                        response = await client.post(self.url, json=body)
                except TimeoutError:
                    reason = f"no whole reply within {seconds:.3g} seconds"
                except (httpx.TransportError, httpx.DecodingError) as error:
                    reason = f"{type(error).__name__}: {error}"
                else:
                    if response.status_code not in RETRY_STATUSES and response.status_code < 500:
                        return self._read(response)
                    reason = f"status {response.status_code}"
                    wait = _retry_after(response, wait)
            if attempt == self.max_retries or time() + wait >= end:
                break
            await asyncio.sleep(wait)
        return _Failure(f"{reason}, after {attempt + 1} tries")

    def _read(self, response: httpx.Response) -> Any:
        """The verdict that a reply contains, or a `_Failure` if it is malformed."""
        if not response.is_success:
            # Not the error of httpx, which shows the url and holds the request with its headers.
            request = httpx.Request("POST", self._shown_url())
            raise httpx.HTTPStatusError(
                f"{self.__name__}: the judge at {request.url} refuses the request with status "
                f"{response.status_code} {response.reason_phrase}.",
                request=request,
                response=httpx.Response(response.status_code, content=response.content, request=request),
            )
        try:
            verdict = self.verdict(response.json())
            if verdict is None:
                return None
            is_number = isinstance(verdict, numbers.Number) or getattr(verdict, "ndim", None) == 0
            if not is_number or isinstance(verdict, complex):
                raise TypeError(f"the verdict is a {type(verdict).__name__}, not a number")
            if not abs(float(verdict)) <= torch.finfo(torch.float32).max:
                raise ValueError(f"the verdict is {verdict}, which is no finite float32")
            return verdict
        except MALFORMED as error:
            return _Failure(f"the reply is malformed ({type(error).__name__}: {error})")

    def _shown_url(self) -> str:
        return str(httpx.URL(self.url).copy_with(userinfo=b"", query=None, fragment=None))

    def _without_keys(self, text: str) -> str:
        """A text, such as an error's, without values of headers and of the url."""
        url = httpx.URL(self.url)
        values = [*(self.headers or {}).values(), *url.params.values(), url.username, url.password]
        for key in sorted({word for value in values for word in value.split()}, key=len, reverse=True):
            text = text.replace(key, "...") if len(key) >= 4 else text
        return text


class _Failure:
    """No verdict, and why."""

    def __init__(self, reason: str):
        self.reason = reason


def _retry_after(response: httpx.Response, default: float) -> float:
    """Seconds to wait by a reply's `Retry-After`, a number or a date; `default` without one that can be read."""
    given = response.headers.get("retry-after", "").strip()
    try:
        if given.isdecimal():
            seconds = float(given)
        else:
            date = email.utils.parsedate_to_datetime(given)
            now = datetime.datetime.now(datetime.UTC)
            seconds = (date.replace(tzinfo=date.tzinfo or datetime.UTC) - now).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return default
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)
