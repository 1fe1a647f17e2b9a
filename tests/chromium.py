"""A real Chromium, headless, that keeps note of every request, and of what a page complains of."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def unavailable() -> str | None:
    """Why there is none here; None where there is."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(missing)} missing (apt-get install chromium chromium-driver)" if missing else None


class Page:
    """One window."""

    def __init__(self, driver: Any):
        self.driver = driver
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def open(self, address: str) -> None:
        self.driver.get(address)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; `arguments[0]` ... are the arguments."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self, selector: str) -> str:
        return self.run("document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def resize(self, width: int, height: int = 900) -> None:
        """The width of a screen or telephone, which windows cannot have on every desktop."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def theme(self, name: str) -> None:
        feature = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})

    def press(self, key: str) -> None:
        """A key, for whatever has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.driver.execute_cdp_cmd(
                "Input.dispatchKeyEvent",
                {"type": kind, "key": key, "code": key, "text": "\r", "windowsVirtualKeyCode": 13},
            )

    def screenshot(self, path: Path) -> None:
        """The whole page, not only what the window shows; a .png or a .webp."""
        kind = {"format": path.suffix.removeprefix("."), **({"quality": 80} if path.suffix == ".webp" else {})}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {**kind, "captureBeyondViewport": True, "clip": self._all()}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    def _all(self) -> dict[str, float]:
        size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def note(self) -> None:
        """Takes in the requests and complaints since the last time."""
        self.complaints += [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                wanted = message["params"]
                self.requests.append(wanted["request"]["url"] if "request" in wanted else wanted["url"])


@contextmanager
def chromium() -> Iterator[Page]:
    """A window that ends with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory() as profile:
        for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(word)
        for word in (
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-default-apps",
            "--no-first-run",
        ):
            options.add_argument(word)
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        try:
            yield Page(driver)
        finally:
            driver.quit()
