"""Texts that a model might write to take over the page that shows them, and what such a page must still be."""

HOSTILE = (
    "<img src=x onerror=window.hurt=1>",
    "<img src=http://127.0.0.1:9/seen.png>",
    "</script><script>window.hurt=1</script>",
    "<!--<script>",
    "--></style></textarea></title><svg onload=window.hurt=1>",
    "\"><b onmouseover='window.hurt=1' style='position:fixed;inset:0'>",
    "' autofocus onfocus=window.hurt=1 tabindex=0 x='",
    "<iframe srcdoc='<script>parent.hurt=1</script>'></iframe>",
    "<base href=//127.0.0.1:9/><meta http-equiv=refresh content='0;url=//127.0.0.1:9/'>",
    "<style>*{display:none}</style><link rel=stylesheet href=//127.0.0.1:9/x.css>",
    "<form action=//127.0.0.1:9/><button autofocus>Continue</button></form>",
    "<details open ontoggle=window.hurt=1><summary>More</summary></details>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=window.hurt=1&gt;'>",
    "<a href='javascript:window.hurt=1'>here</a> javascript:window.hurt=1",
    "[here](javascript:window.hurt=1) ![x](http://127.0.0.1:9/x.png) `</code><img src=x onerror=window.hurt=1>`",
    "&lt;img src=x onerror=window.hurt=1&gt; &#60;b&#62; &amp;amp; &nbsp;",
    "{{data}} {{policy}} {{title}} {{constructor.constructor('window.hurt=1')()}} ${window.hurt=1} <%= 1 %>",
    "\\u003cimg src=x onerror=window.hurt=1\\u003e \\x3cb\\x3e",
    "*/window.hurt=1//\u2028window.hurt=1//\u2029]]>",
    "\u202e>b/<gnp.exe\u202c",
)

PARTS = """
const elements = [...document.documentElement.querySelectorAll("*")];
return [...new Set(elements.flatMap((each) => [each.localName, ...each.getAttributeNames()]))];
"""
SINKS = {
    "HTML": "document.body.innerHTML = '<img src=x onerror=window.hurt=1>'",
    "a handler": "document.body.setAttribute('onclick', 'window.hurt=1')",
    "a script": "document.createElement('script').text = 'window.hurt=1'",
    "a frame": "document.createElement('iframe').srcdoc = '<script>parent.hurt=1</script>'",
    "a fragment": "document.createRange().createContextualFragment('<b>x</b>')",
    "written": "document.write('<b>x</b>')",
    "evaluated": "setTimeout('window.hurt=1')",
}
"""Ways by which a fault in a page's script could make a text into HTML or code."""


def parts(driver):
    """The names of a page's elements and of their attributes."""
    return set(driver.execute_script(PARTS))


def is_hurt(driver):
    """True if a hostile text has run as a script."""
    return driver.execute_script("return 'hurt' in window")


def open_sinks(driver):
    """The `SINKS` that the page's policy does not close."""
    attempt = "try {{ {} }} catch (error) {{ return error instanceof TypeError }} return false"
    return [name for name, sink in SINKS.items() if not driver.execute_script(attempt.format(sink))]
