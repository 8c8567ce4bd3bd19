"""Chat templates that eat memory or time, reach for what is not theirs, or are simply wrong."""


def grown(step, start="'a'", times=99, end=""):
    """A template that puts `step`, an expression of ns.x, into ns.x so many times."""
    loop = f"{{% for i in range({times}) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{loop}{end}"


def nested(end, pair="[ns.x, ns.x]", start="[0]"):
    """A template that does `end` to an ns.x that is small in memory and has 2^60 elements when walked through."""
    return grown(pair, start, times=60, end=end)


HOSTILE = {
    "string times": "{{ 'a' * 10**9 }}",
    "string times, large but not absurd": "{{ ('a' * 9000000) | length }}",
    "list times": "{{ [1] * 10**9 }}",
    "times in a set": "{% set x = 'a' * 10**10 %}",
    "constant at compile time": "{% if 'a' * 10**9 == 'b' %}{% endif %}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "power by steps": grown("ns.x * ns.x", start="3", end="{{ ns.x }}"),
    "negative power": "{{ 3 ** -(10**9) }}",
    "doubling by +": grown("ns.x + ns.x"),
    "doubling by ~": grown("ns.x ~ ns.x"),
    "doubling wide characters": grown("ns.x ~ ns.x", start="'\U0001f600'"),
    "doubling lists": grown("ns.x + ns.x", start="[0]"),
    "doubling blocks": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "doubling by join": grown("[ns.x, ns.x] | join"),
    "doubling by replace": grown("ns.x.replace('a', 'aa')"),
    "doubling by format": grown("'{0}{0}'.format(ns.x)"),
    "doubling by percent": grown("'%s%s' % (ns.x, ns.x)"),
    "kept slices": "{% set s = 'a' * 100000 %}" + grown("[ns.x, s[1:], s[2:], s[3:]]", times=9999),
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent with many keys": "{% set p = '%(' * 1000000 %}{{ p % {'a': 1} }}",
    "format width": "{{ '{:>1000000000}'.format('a') }}",
    "format nested width": "{{ '{:>{w}}'.format('a', w=1000000000) }}",
    "format through attr": "{{ ('{:>1000000000}' | attr('format'))('a') }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%1000000000s' | format('a') }}",
    "many format fields": "{{ ('{}' * 100000).format(*range(100000)) }}",
    "center filter": "{{ 'a' | center(1000000000) }}",
    "center through map": "{{ ['a'] | map('center', 1000000000) | list }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "translate": "{{ 'aaaa'.translate({97: 'b' * 1000}) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "indent by number": "{{ 'a' | indent(1000000000, true) }}",
    "indent by string": "{{ ('\n' * 10000) | indent('a' * 10000, true, true) }}",
    "replace filter": "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 10000).replace('', 'b' * 100000) }}",
    "join filter": "{{ range(10000) | join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(['b'] * 10000) }}",
    "join of wide characters": "{% set s = '\u4e00\u4e01' * 3000000 %}{{ s | join(',') }}",
    "list of wide characters": "{% set s = '\u4e00\u4e01' * 3000000 %}{{ s | list }}",
    "arguments of wide characters": "{% set s = '\u4e00\u4e01' * 3000000 %}{{ cycler(*s) }}",
    "sort of wide characters": "{% set s = '\u4e00\u4e01' * 3000000 %}{{ s | sort }}",
    "split": "{% set s = 'ab ' * 2500000 %}{{ s.split(' ') }}",
    "split at white space": "{% set s = 'ab ' * 2500000 %}{{ s.split() }}",
    "splitlines": "{% set s = 'ab\n' * 2500000 %}{{ s.splitlines() }}",
    "strip of many": "{{ ('a' * 4000000).strip('b' * 3000000 + 'a') }}",
    "trim of many": "{{ ('a' * 4000000) | trim('b' * 3000000 + 'a') }}",
    "rfind": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "find many times": "{% set s = 'a' * 3000000 %}{% for i in range(100000) %}{{ s.find('b') }}{% endfor %}",
    "in many times": "{% set s = 'a' * 3000000 %}{% for i in range(100000) %}{{ 'b' in s }}{% endfor %}",
    "equal many times": "{% set s = 'a' * 1000000 %}{% set t = 'a' * 1000000 %}"
    "{% for i in range(100000) %}{{ s == t }}{% endfor %}",
    "tojson indent": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "tojson deep indent": grown(
        "[ns.x, ns.x is string]", start="[]", times=900, end="{{ ns.x | tojson(indent=9999) }}"
    ),
    "tojson separators": "{{ ([1] * 10000) | tojson(separators=('a' * 100000, ':')) }}",
    "tojson escapes": "{{ ('\\x00' * 7000000) | tojson }}",
    "repr escapes": "{{ ['\\x00' * 7000000] }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "batch fill": "{{ [1] | batch(1000000000, 'a') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "sum of lists": "{{ ([[1] * 100] * 10000) | sum(start=[]) }}",
    "dotted path": "{{ range(100000) | map(attribute='a.' * 100000) | list }}",
    "sort by dotted path": "{{ range(100000) | sort(attribute='a.' * 10000) }}",
    "time length": "{{ strftime_now('%c' * 1000000) }}",
    "nested list as text": nested("{{ ns.x }}"),
    "nested list as json": nested("{{ ns.x | tojson }}"),
    "nested list in format": nested("{{ '{}'.format(ns.x) }}"),
    "nested list in percent": nested("{{ '%s' % [ns.x] }}"),
    "nested list equal": nested("{% set x = ns.x %}") + nested("{{ ns.x == x }}"),
    "nested list equal by test": nested("{% set x = ns.x %}") + nested("{{ ns.x is eq(x) }}"),
    "nested tuple as key": nested("{{ {ns.x: 1} }}", pair="(ns.x, ns.x)", start="(0,)"),
    "nested tuple as index": nested("{{ {1: 1}[ns.x] }}", pair="(ns.x, ns.x)", start="(0,)"),
    "nested tuple in get": nested("{{ {1: 1}.get(ns.x) }}", pair="(ns.x, ns.x)", start="(0,)"),
    "nested tuple in dict": nested("{{ ns.x in {1: 1} }}", pair="(ns.x, ns.x)", start="(0,)"),
    "nested in a namespace": nested("{{ ns }}"),
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "deep list as text": grown("[ns.x]", start="[]", times=20000, end="{{ ns.x }}"),
    "deep list as json": grown("[ns.x]", start="[]", times=20000, end="{{ ns.x | tojson }}"),
    "long range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested loops": "{% for a in range(9999) %}" * 3 + "{{ a }}" + "{% endfor %}" * 3,
    "nested loops without a body": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with a test": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "loop with a long body": "{% for a in range(99999) %}" + "{% set x = 1 %}" * 3000 + "{% endfor %}",
    "loop with a long text": "{% for a in range(99999) %}" + "a" * 60000 + "{% endfor %}",
    "loop with a long text in a block": "{% set x %}{% for a in range(99999) %}"
    + "a" * 60000
    + "{% endfor %}{% endset %}",
    "loop with a long expression": "{% for a in range(99999) %}{{ " + " or ".join(["false"] * 5000) + " }}{% endfor %}",
    "recursive loop": "{% for a in range(3) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macro with long defaults": "{% macro m(n="
    + "-" * 1
    + "(1"
    + " or 1" * 3000
    + ")) %}{% endmacro %}{% for a in range(99999) %}{{ m() }}{% endfor %}",
    "caller in a loop": "{% macro m() %}{% for a in range(999) %}{{ caller() }}{% endfor %}{% endmacro %}{% call m() %}"
    + "a" * 50000
    + "{% endcall %}",
    "chained maps": "{{ range(100000)" + " | map('upper')" * 1000 + " | list }}",
    "sum of ranges": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "namespace copies": "{% set d = dict(range(20000) | map('string') | batch(2)) %}"
    + grown("[ns.x, namespace(d)]", times=99999),
    "kept dicts": "{% set ns = namespace(x=0) %}{% for i in range(99999) %}{% set ns.x = [ns.x"
    + ", {}" * 1000
    + "] %}{% endfor %}",
    "negative charge": "{{ [-1000000000] | map(' spend') | list }}{% for a in range(9999) %}"
    "{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "urlize": "{{ ('a.' * 1000000) | urlize }}",
    "append": "{% set x = [] %}{{ x.append(1) }}",
    "autoescape": "{% autoescape 'a' * 10**9 %}{% endautoescape %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'x' as y %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block a %}{% endblock %}{% for i in range(99999) %}{{ self.a() }}{% endfor %}",
    "dunder": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "dunder through attr": "{{ (('' | attr('__class__')) | attr('__mro__'))[1] }}",
    "dunder through format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "dunder of a namespace": "{% set ns = namespace() %}{% set ns.__class__ = range %}{{ ns.__class__(1) }}",
    "dunder in namespace()": "{{ namespace(**{'__init__': range}).__init__(1) }}",
    "method of a class": "{{ dict.mro()[1] }}",
    "globals of a global": "{{ raise_exception.__globals__['json'].x }}",
    "globals of a function": "{{ range.__func__.__globals__.x }}",
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep negation": "{{ " + "not " * 15000 + "1 }}",
    "deep sum": "{{ 1" + " + 1" * 15000 + " }}",
    "deep attributes": "{{ messages" + ".a" * 30000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep loops": "{% for a in [1] %}" * 1500 + "{% endfor %}" * 1500,
    "many branches": "".join(f"{{% set a{i}=1 %}}" for i in range(2000))
    + "{% if 1 %}{% endif %}" * 1400
    + "{{ x.y.z }}",
    "open string": "{{ '" + "\\'" * 30000,
    "long number": "{{ " + "9" * 60000 + " }}",
    "long hexadecimal number": "{{ 0x" + "f" * 60000 + " }}",
    "too long": "a" * 70000,
    "unknown filter": "{{ 1 | nonesuch }}",
    "unknown tag": "{% nonesuch %}",
    "division by zero": "{{ 1 / 0 }}",
    "undefined": "{{ nonesuch.x }}",
    "lone surrogates": "{{ '\\ud800'.encode() }}",
}

# These stay in bounds, or do so on a fast machine: what they make is small enough, and made soon enough.
IN_BOUNDS = {
    "string times, large but not absurd",
    "power",
    "negative power",
    "many format fields",
    "translate",
    "split",
    "split at white space",
    "splitlines",
    "rfind",
    "equal many times",
    "namespace in itself",
    "nested loops with a test",
    "urlize",
    "block",
}
