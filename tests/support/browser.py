"""A headless Chromium for tests of pages, which reaches no other machine, and what such tests ask of it."""

import contextlib
import os
import re
import shutil

import pytest

BROWSERS = (os.environ.get("CHROME", ""), "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")

in_a_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="found no browser: set $CHROME or install chromium and chromium-driver"
)


@contextlib.contextmanager
def chromium():
    """Its driver, whose log has what pages print on the console and what they fail to load."""
    from selenium import webdriver  # noqa: PLC0415

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1000,760"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@contextlib.contextmanager
def emulated(driver, width, height, scheme):
    """A window of this size, of a reader who prefers this colour scheme and no motion."""
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in features.items()]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def contrast(one, other):
    """WCAG's ratio of two colours written as #rrggbb."""

    def luminance(colour):
        parts = (int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour))
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
