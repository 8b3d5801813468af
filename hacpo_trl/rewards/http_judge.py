"""A judge behind HTTP, such as a language model behind an OpenAI-like API, as an async reward function."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx


logger = logging.getLogger(__name__)

# Worth another try: the judge is overloaded or restarting. Any other error status means that the request is wrong.
RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


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
        verdict: Makes a reward, or None for no verdict, from the JSON of the answer.
        headers: HTTP headers, such as an authorization.
        max_concurrency: Requests under way at one time.
        timeout: Limit of one request, in seconds.
        max_retries: Further tries after a failed connection or a status such as 429 or 503.
        backoff: Seconds before the first further try; doubled for each one after it, and spread at random so that
            requests do not all come back at once. A `Retry-After` of the judge wins.
        name: Name in metrics.
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
    ):
        if max_concurrency < 1 or timeout <= 0 or max_retries < 0:
            raise ValueError(
                f"HTTPJudge needs max_concurrency >= 1, timeout > 0 and max_retries >= 0, not {max_concurrency}, "
                f"{timeout} and {max_retries}."
            )
        self.__name__ = name
        self.url, self.request, self.verdict, self.headers = url, request, verdict, headers
        self.max_concurrency, self.timeout = max_concurrency, timeout
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
        """Verdicts on a batch of completions; None where the judge could not be asked, which is logged and counted.

        Raises:
            httpx.HTTPStatusError: The judge refuses a request for good (a status such as 400, 401 or 404).
        """
        slots = asyncio.Semaphore(self.max_concurrency)
        async with httpx.AsyncClient(headers=self.headers, timeout=self.timeout) as client:
            verdicts = await asyncio.gather(
                *(
                    self._ask(
                        client, slots, self.request(prompt, completion, **{key: columns[key][i] for key in columns})
                    )
                    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
                )
            )
        failures = [verdict for verdict in verdicts if isinstance(verdict, httpx.HTTPError)]
        if failures:
            logger.warning(
                f"{self.__name__}: {len(failures)} of {len(verdicts)} completions got no verdict from {self.url} "
                f"after {self.max_retries + 1} tries. The last error: {failures[-1]!r}."
            )
        if log_metric is not None:
            log_metric(f"{self.__name__}/failures", float(len(failures)))
        return [None if isinstance(verdict, httpx.HTTPError) else verdict for verdict in verdicts]

    async def _ask(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, body: dict) -> Any:
        """The verdict on one request, or the error of the last try."""
        error: httpx.HTTPError
        for attempt in range(self.max_retries + 1):
            wait = self.backoff * 2**attempt * random.uniform(0.5, 1.5)
            try:
                async with slots:
                    response = await client.post(self.url, json=body)
                if response.status_code not in RETRY_STATUSES:
                    return self.verdict(response.raise_for_status().json())
                error = httpx.HTTPStatusError(
                    f"status {response.status_code}", request=response.request, response=response
                )
                if response.headers.get("retry-after", "").isdigit():
                    wait = float(response.headers["retry-after"])
            except httpx.TransportError as transport_error:
                error = transport_error
            if attempt < self.max_retries:
                await asyncio.sleep(wait)
        return error
