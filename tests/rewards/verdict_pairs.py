r"""Answers beside golds, right and wrong: what a verifier must tell apart.

Each family is a function that yields (gold, answer, whether it is right). What is right is what the benchmarks' field
takes for right: equal values in any form, six significant digits of a decimal, units aside, 50% for 0.5 and for 50.
"""

from collections.abc import Iterator
from fractions import Fraction


Pair = tuple[str, str, bool]


def _pairs(rows: list[tuple[str, list[str], list[str]]]) -> Iterator[Pair]:
    for gold, right, wrong in rows:
        yield from ((gold, answer, True) for answer in right)
        yield from ((gold, answer, False) for answer in wrong)


def fractions() -> Iterator[Pair]:
    for a, b in [(1, 2), (1, 3), (2, 3), (3, 4), (5, 6), (7, 8), (3, 7), (11, 12), (22, 7), (5, 16), (9, 40), (13, 6)]:
        value = Fraction(a, b)
        exact = value.denominator in (2, 4, 8, 16, 40)
        decimal = f"{float(value):.12g}" if exact else f"{float(value):.6g}"
        right = [rf"\dfrac{{{a}}}{{{b}}}", f"{a}/{b}", rf"\frac{{{3 * a}}}{{{3 * b}}}", decimal]
        wrong = [rf"\frac{{{b}}}{{{a}}}", rf"\frac{{{a + 1}}}{{{b}}}", rf"-\frac{{{a}}}{{{b}}}"]
        if not exact:
            wrong.append(f"{float(value):.3g}")
        yield from _pairs([(rf"\frac{{{a}}}{{{b}}}", right, wrong)])
    yield from _pairs(
        [
            (r"-\frac{1}{2}", [r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5"], ["0.5", r"\frac{1}{2}"]),
            (r"1\frac{1}{2}", ["1.5", r"\frac{3}{2}", r"1 \frac{1}{2}"], [r"\frac{1}{2}", r"\frac{11}{2}", "1.2"]),
            (r"137 \frac{1}{2}", ["137.5", r"\frac{275}{2}"], [r"\frac{137}{2}", "137.2"]),
            (r"\frac{1}{\frac{2}{3}}", [r"\frac{3}{2}", "1.5"], [r"\frac{1}{6}", r"\frac{2}{3}"]),
        ]
    )


def thousands() -> Iterator[Pair]:
    for n in (1000, 12345, 1234567, 250000, 999999, 40320):
        commas = f"{n:,}"
        right = [commas, commas.replace(",", "{,}"), commas.replace(",", r",\!"), commas.replace(",", r"\,"), f"{n}.0"]
        wrong = [str(n + 1), str(n // 10), f"{n}0", commas.replace(",", ".")]
        yield from _pairs([(str(n), right, wrong), (commas, [str(n)], [str(n - 1)])])


def percent() -> Iterator[Pair]:
    for p, fraction in [("5", "0.05"), ("12.5", "0.125"), ("37.5", "0.375"), ("62", "0.62"), ("150", "1.5")]:
        right = [fraction, rf"{p} \%", p, rf"{p} \text{{ percent}}"]
        tenth, thousandth = f"{float(p) / 10:g}", f"{float(p) / 1000:g}"
        yield from _pairs(
            [
                (rf"{p}\%", right, [tenth, thousandth, rf"{float(p) + 1:g}\%", rf"-{p}\%"]),
                (fraction, [rf"{p}\%"], [p, tenth]),
            ]
        )
    yield from _pairs(
        [
            (r"16\frac{2}{3}\%", [r"\frac{50}{3}\%", r"\frac{1}{6}", "16.6667"], [r"16\%", r"\frac{2}{3}\%", "16.7"]),
            (r"33\frac{1}{3}\%", [r"\frac{1}{3}", r"\frac{100}{3}\%"], [r"33\%", "0.33"]),
        ]
    )


def units() -> Iterator[Pair]:
    for n in (7, 12, 45):
        right = [
            rf"{n} \text{{ cm}}", rf"{n}\,\mathrm{{kg}}", rf"{n} \text{{ square feet}}", f"{n} hours", rf"\${n}",
            rf"{n}\text{{ miles per hour}}", rf"{n} \text{{ marbles}}", f"{n} dollars",
        ]  # fmt: skip
        wrong = [
            f"{n} million", rf"{n} \text{{ million}}", rf"{n} \text{{ dozen}}", rf"{n} \text{{ hundred}}", f"{n}i",
            rf"{n} \text{{ i}}", f"{n}e", rf"{n} \text{{ or }} {n + 1}", rf"{n} \text{{ squared}}", f"{n}x", f"-{n}",
            rf"{n} \text{{ is wrong}}", rf"{n}\text{{x}}",
            f"not {n}", rf"\text{{not }} {n}", rf"\text{{less than }} {n}", rf"{n} \text{{ below}}",
        ]  # fmt: skip
        yield from _pairs([(str(n), right, wrong)])
    yield from _pairs(
        [
            ("5 million", ["5000000", r"5{,}000{,}000", r"5 \times 10^6", r"5 \text{ million}"], ["5", "5 billion"]),
            (r"3 \text{ thousand dollars}", ["3000", r"\$3{,}000"], ["3", "300"]),
            ("6m", ["6m", r"6 \text{m}"], ["6", "6n", "6M"]),
            (r"12\pi", [r"12\pi \text{ units}^2", r"12 \pi"], ["12", r"12\pi^2"]),
            (r"15\mbox{ cm}^2", ["15", r"15 \text{ cm}^2"], ["225", r"15x^2"]),
            ("2t", ["2t", "t+t"], ["2", "t", "2T"]),
        ]
    )


def radicals() -> Iterator[Pair]:
    yield from _pairs(
        [
            (r"\sqrt{8}", [r"2\sqrt{2}", r"2\sqrt2", "2.82843"], [r"2\sqrt{3}", r"4\sqrt{2}", "2.83"]),
            (r"\sqrt{50}", [r"5\sqrt{2}", "7.07107"], [r"2\sqrt{5}", r"25\sqrt{2}"]),
            (r"\frac{1}{\sqrt{2}}", [r"\frac{\sqrt{2}}{2}", r"2^{-1/2}"], [r"\frac{\sqrt{2}}{4}", r"\sqrt{2}"]),
            (r"\sqrt{12}+\sqrt{27}", [r"5\sqrt{3}"], [r"3\sqrt{5}", r"\sqrt{39}"]),
            (r"\frac{1}{\sqrt{3}-1}", [r"\frac{\sqrt{3}+1}{2}"], [r"\frac{\sqrt{3}-1}{2}", r"\sqrt{3}+1"]),
            (r"\sqrt[3]{54}", [r"3\sqrt[3]{2}"], [r"2\sqrt[3]{3}", r"3\sqrt{2}"]),
            (r"\sqrt{3+2\sqrt{2}}", [r"1+\sqrt{2}"], [r"1-\sqrt{2}", r"2+\sqrt{2}"]),
            (r"\sqrt{2}", [r"2^{1/2}", r"2^{\frac{1}{2}}", "√2", "1.41421"], [r"\sqrt{3}", "2", "1.41"]),
            (r"\frac{6}{\sqrt{3}}", [r"2\sqrt{3}"], [r"3\sqrt{2}", r"6\sqrt{3}"]),
            (r"1\pm\sqrt{19}", [r"1-\sqrt{19}, 1+\sqrt{19}"], [r"1+\sqrt{19}", r"\pm\sqrt{19}"]),
            (r"(2+\sqrt{3})(2-\sqrt{3})", ["1"], ["7", "-1"]),
            (r"\sqrt{\frac{4}{9}}", [r"\frac{2}{3}"], [r"\frac{4}{9}", r"\frac{4}{3}"]),
        ]
    )


def polynomials() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("2k+2", ["2(k+1)", "2k + 2", "2+2k"], ["2k+1", "2(k+2)", "2K+2"]),
            ("(x-1)(x+1)", ["x^2-1", "(x+1)(x-1)"], ["x^2+1", "(x-1)^2", "1-x^2"]),
            ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2"], ["(x-1)^2", "x^2+x+1"]),
            ("p-q", ["-q+p", "-(q-p)"], ["q-p", r"-\frac{31}{89}", "p+q"]),
            (r"\frac{a+c}{2}", [r"\frac{a}{2}+\frac{c}{2}", r"\frac{c+a}{2}"], ["b", "a+c", r"\frac{a-c}{2}"]),
            (r"\frac{x^2-1}{x-1}", ["x+1"], ["x-1", "x"]),
            ("x^3-8", ["(x-2)(x^2+2x+4)"], ["(x-2)^3", "(x+2)(x^2-2x+4)"]),
            ("a^2-b^2", ["(a-b)(a+b)", "(a+b)(a-b)"], ["(a-b)^2", "b^2-a^2"]),
            (r"\frac{n(n+1)}{2}", [r"\frac{n^2+n}{2}", "0.5n(n+1)"], [r"\frac{n(n-1)}{2}", "n(n+1)"]),
            ("x^2", ["x²", "x*x", r"x \cdot x"], ["2x", "x", "y^2"]),
            (r"\frac{1}{x}+\frac{1}{y}", [r"\frac{x+y}{xy}"], [r"\frac{1}{x+y}", r"\frac{2}{x+y}"]),
            ("x", ["x", r"\frac{2x}{2}"], ["y", "X", "|x|", r"\sqrt{x^2}"]),
            ("0", ["0", "0.0", "x-x"], ["M-m", "1", "x"]),
            ("xy", ["yx", r"x \cdot y"], ["x+y", "x/y", "XY"]),
            ("6x-3y", ["3(2x-y)"], ["3(2x+y)", "6y-3x"]),
            ("2^k", ["2^{k}", r"2 \cdot 2^{k-1}"], ["2^{k+1}", "k^2", "2k"]),
            ("|a-b|", ["|b-a|"], ["b-a", "a-b", "0", "|a+b|"]),
            ("a_1+a_2", ["a_2+a_1", "a_{1}+a_{2}"], ["a_1+a_3", "2a_1"]),
        ]
    )


def functions() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("f^{-1}(x)", ["f^{-1}(x)"], [r"\frac{1}{f(x)}", "f(x)", "-f(x)"]),
            (r"\angle ABC", [r"\angle ABC"], [r"\angle ACB", r"\triangle ABC"]),
            (r"\cot x", [r"\frac{\cos x}{\sin x}", r"\frac{1}{\tan x}"], [r"\tan x", r"\frac{\sin x}{\cos x}"]),
            (r"\sin^2 x", [r"1-\cos^2 x"], [r"1+\cos^2 x", r"\cos^2 x", r"\sin x^2"]),
            (r"\sin 2x", [r"2\sin x\cos x"], [r"2\sin x", r"\sin x\cos x"]),
            (r"\ln 6", [r"\ln 2+\ln 3", "1.79176"], [r"\ln 5", r"\ln 2 \ln 3", "1.79"]),
            (r"\log_2 8", ["3"], ["4", "8"]),
            (r"\log_{10} 1000", ["3"], ["2", "10"]),
            ("e^2", [r"e \cdot e", "7.38906"], ["2e", "7.39", "e"]),
            ("e", ["e", "2.71828"], ["2.72", "2.7", "E_1"]),
            (r"\pi", [r"\pi", "π", "3.14159"], ["3.14", r"\frac{22}{7}", r"2\pi"]),
            (r"\frac{\pi}{4}", [r"\arctan 1", "0.785398"], [r"\frac{\pi}{2}", "0.79", "45"]),
            (r"2^{10}", ["1024"], ["1000", "20", "100"]),
            (r"\tan x", [r"\frac{\sin x}{\cos x}"], [r"\cot x", r"\sin x"]),
            (r"\cos 2x", [r"2\cos^2 x-1", r"1-2\sin^2 x"], [r"2\cos x", r"\cos^2 x"]),
            (r"e^{x+y}", [r"e^x e^y", r"e^y e^x"], [r"e^x+e^y", r"e^{xy}"]),
            (r"\frac{d}{2}", ["0.5d"], ["d", "2d"]),
            (r"\arcsin(10/13)", [r"\arcsin\frac{10}{13}"], [r"\arccos(10/13)", r"\arcsin(13/10)"]),
            (r"\sin 60^\circ", [r"\frac{\sqrt{3}}{2}", r"\cos 30^\circ"], [r"\frac{1}{2}", r"\sin 60", r"60^\circ"]),
            (r"\frac{1}{2}", [r"\cos 60^\circ", r"\sin(30^\circ)"], [r"\cos 30^\circ", r"\sin 30"]),
            (r"\tan 45^\circ", ["1"], [r"\sqrt{3}", r"\tan 45", "45"]),
        ]
    )


def counting() -> Iterator[Pair]:
    yield from _pairs(
        [
            (r"\binom{5}{2}", ["10", r"\frac{5!}{2!3!}"], ["20", "25", r"\binom{5}{1}"]),
            (r"\binom{n}{r}", [r"\binom{n}{r}", r"\frac{n!}{r!(n-r)!}"], ["0", r"\binom{r}{n}", r"\frac{n!}{r!}"]),
            (r"\binom{2n}{n}", [r"\frac{(2n)!}{(n!)^2}"], [r"\frac{(2n)!}{n!}", r"\binom{n}{2}"]),
            ("5!", ["120", r"5 \cdot 4!"], ["5", "24", "100"]),
            ("2016", ["2016"], ["2016!", "2015"]),
            (
                r"\lfloor n/2 \rfloor",
                [r"\left\lfloor \frac{n}{2} \right\rfloor"],
                [r"\frac{n}{2}", r"\lceil n/2 \rceil"],
            ),
            (r"\lceil 2.3 \rceil", ["3"], ["2", "2.3"]),
            (r"\lfloor \pi \rfloor", ["3"], ["4", r"\pi"]),
            (r"2^{2024}", [r"4^{1012}"], [r"2^{2023}", r"4^{2024}"]),
        ]
    )


def intervals() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("[1,2)", ["[1, 2)", r"1 \le x < 2"], ["[1,2]", "(1,2)", "(1,2]", "[1,3)"]),
            ("(0,1)", ["0<x<1"], [r"\{0,1\}", "[0,1]", "(0,1]"]),
            ("[0,1]", [r"0 \le x \le 1", r"x \in [0,1]"], ["(0,1)", "[0,1)", r"\{0,1\}"]),
            (r"(-\infty,3]", [r"x \le 3", r"3 \ge x"], ["x<3", r"x \ge 3", r"(-\infty,3)"]),
            (r"(2,\infty)", ["x>2", "2<x"], [r"x \ge 2", "x<2", r"[2,\infty)"]),
            ("0<x<1", ["1>x>0", "0 < x < 1", "(0,1)"], [r"0 \le x<1", "0<x<2", "1<x<0", "x<1"]),
            (r"(0,1)\cup(2,3)", [r"(2,3)\cup(0,1)", r"(0,1) \cup (2,3)"], [r"(0,1)\cup(2,4)", "(0,3)", "(0,1)"]),
            (r"x \in [-2,7]", ["[-2,7]", r"-2 \le x \le 7"], ["(-2,7)", "[-7,2]"]),
            (r"k \ge 2", [r"k \geq 2", r"k \geqslant 2", r"2 \le k"], ["k>2", r"k \le 2", r"k \ge 3", "2"]),
            (r"x \ne 1", [r"x \neq 1", "x≠1"], ["1", "x=1", r"x \ne 2"]),
            ("x<5", ["5>x"], ["5", "x>5", r"x \le 5", "x<6"]),
        ]
    )


def collections_of() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("1,2,3", ["3,2,1", r"\{1,2,3\}", "1, 3, 2", r"1, 2 \text{ and } 3"], ["1,2", "1,2,3,4", "1,2,4", "6"]),
            (r"\{1,2\}", ["2, 1", r"\{2,1\}", r"1 \text{ and } 2"], ["1", "[1,2]", r"\{1,2,3\}", r"\{1,3\}"]),
            ("(1,2)", ["(1, 2)", "1,2", "(x,y)=(1,2)", "x=1, y=2"], ["(2,1)", "[1,2]", "(1,3)", "(1,2,3)", "3"]),
            ("[1,2]", ["[1, 2]"], ["(1,2)", "[2,1]", "1"]),
            ("(2,3),(3,2)", ["(3,2), (2,3)", "(2,3), (3,2)"], ["(2,3)", "(2,3),(2,3)", "(2,3),(3,3)"]),
            ("7,9", ["9; 7", r"7 \text{ or } 9", "9,7"], ["7", "9", "16", "7,8"]),
            ("2", [r"\{2\}", "x=2"], ["2,2", "2,3", "(2,2)"]),
            ("5", ["5"], ["5 or 6", r"5 \text{ or } 6", "5,6", "4,5"]),
            (r"(3,\frac{\pi}{2})", [r"\left(3,\dfrac{\pi}{2}\right)"], [r"(3,\pi)", r"(\frac{\pi}{2},3)"]),
            (r"\emptyset", [r"\varnothing", "∅", r"\{\}", "{}"], ["0", r"\{0\}", r"\{\emptyset\}"]),
            ("$69$,$84$", ["84, 69"], ["69", "69,85"]),
            ("(1,2,3)", ["(1,2,3)", "1,2,3"], ["(3,2,1)", "(1,2)"]),
            ("E_{1},E_{2}", ["E_2, E_1"], ["E_1", "E_1,E_3"]),
        ]
    )


def matrices() -> Iterator[Pair]:
    def matrix(rows: str, kind: str = "pmatrix") -> str:
        return rf"\begin{{{kind}}} {rows} \end{{{kind}}}"

    yield from _pairs(
        [
            (matrix(r"1 \\ 2"), [matrix(r"1 \\ 2"), matrix(r"1 \\ 2", "bmatrix")], [matrix(r"1 \\ 3"), "(2,1)"]),
            (matrix(r"1/2 \\ 2"), [matrix(r"0.5 \\ 2", "bmatrix")], [matrix(r"2 \\ 1/2"), matrix(r"0.5 \\ 3")]),
            (
                matrix(r"1 & 2 \\ 3 & 4"),
                [matrix(r"1 & 2 \\ 3 & 4", "bmatrix"), matrix(r"1&2\\3&4")],
                [matrix(r"1 & 3 \\ 2 & 4"), matrix(r"1 & 2 \\ 3 & 5"), "-2", matrix(r"1 & 2")],
            ),
            (
                matrix(r"\sqrt{4} & 0 \\ 0 & 1"),
                [matrix(r"2 & 0 \\ 0 & 1")],
                [matrix(r"4 & 0 \\ 0 & 1"), matrix(r"1 & 0 \\ 0 & 2")],
            ),
        ]
    )


def complex_numbers() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("6-5i", ["-5i+6", "6 - 5i"], ["6+5i", "5-6i", "6", "11"]),
            ("2i", [r"\sqrt{-4}", "i+i"], ["2", "-2i", "2j", "i"]),
            (r"\sqrt{-4}", ["2i"], ["2", "-2"]),
            ("i", ["i"], ["-i", "1", "-1"]),
            (r"\frac{1+i}{2}", [r"\frac{1}{2}+\frac{i}{2}", r"\frac{1}{1-i}"], [r"\frac{1-i}{2}", r"\frac{1}{1+i}"]),
            ("-1", ["i^2", "-1"], ["1", "i"]),
            ("(1+i)^2", ["2i"], ["2", "1+i^2"]),
            (r"1+\sqrt{3}i", [r"1+i\sqrt{3}"], [r"1-\sqrt{3}i", r"\sqrt{3}+i"]),
            ("3+4i, 3-4i", ["3-4i, 3+4i", r"3 \pm 4i"], ["3+4i", "4+3i, 4-3i"]),
        ]
    )


def names() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("5", ["x=5", "x = 5", r"\theta = 5", "AB=5", "f(2)=5", r"\angle A = 5", "n = 10/2 = 5"], ["0=5", "2x=5"]),
            ("x=5", ["5", "x=5", "x = 10/2"], ["y=5", "x=6", "5=6", "2x=5"]),
            ("7", ["x=7", "6+1=7", "3+4=7", "x = 3+4 = 7"], ["x!=7", r"x \ne 7", "2x=7", "6=7", "3+5=7", "x=6=7"]),
            ("6", ["2 \\cdot 3 = 6"], ["xy=6", "x+y=6", "5=6", "x^2=6"]),
            ("f(x)=2x", ["2x", "f(x) = 2x"], ["f(x)=3x", "x", "g(x)=2x"]),
            ("y = 2x + 3", ["2x+3", "y - 2x = 3", "2x-y+3=0"], ["y=3x+2", "2x-3", "y=-2x+3", "x=2y+3"]),
            ("x^2+y^2=4", ["y^2+x^2=4", "x^2+y^2-4=0"], ["x^2+y^2=2", "x^2-y^2=4", "4"]),
            ("3", ["x = 6/2 = 3", r"x=\sqrt{9}=3"], ["x=4=3", "9=3", "x>3"]),
            ("P(A)=\\frac{1}{4}", [r"\frac{1}{4}", "0.25"], [r"P(B)=\frac{1}{4}", r"\frac{3}{4}"]),
            ("x=1, y=2", ["(1,2)", "x=1, y=2"], ["x=2, y=1", "(2,1)", "2,1"]),
        ]
    )


def words_and_choices() -> Iterator[Pair]:
    yield from _pairs(
        [
            ("A", [r"\text{(A)}", "(A)", r"\textbf{A}", "A"], ["B", r"\text{(B)}", "AB"]),
            (r"\text{(A)}", ["A", "(A)"], ["B", "1"]),
            (r"\textbf{(D)} 12", ["D", "12", r"\text{(D) } 12", "(D)"], ["C", "13", "(C) 12", "(D) 13"]),
            ("12", [r"\textbf{(D)} 12", "(D) 12"], ["(D) 13", "D"]),
            ("D", ["(D) 12", r"\textbf{(D)}"], ["(C) 12", "12"]),
            (r"\text{Evelyn}", ["Evelyn", r"\text{evelyn}"], [r"\text{Angela}", "Eve"]),
            (r"\text{even}", [r"\text{Even}", "even"], [r"\text{odd}", "not even", r"\text{not even}"]),
            (r"\text{east}", ["east", "East"], [r"\text{west}", "north east"]),
            (r"\text{Yes}", ["yes", r"\text{yes}"], ["no", r"\text{No}"]),
            ("3", ["3"], [r"\text{three or four}", "A"]),
            (r"\text{no solution}", ["no solution", r"\text{No solution}"], [r"\text{one solution}", "0"]),
            (r"\text{Friday}", ["Friday"], ["Saturday", "Monday"]),
            (r"\text{no}", ["no", "No"], ["yes", "on"]),
            ("Al", ["Al", r"\text{Al}"], ["Bo"]),
            ("xyz", ["zyx", "xyz"], ["XYZ", "xy"]),
        ]
    )


def decimals() -> Iterator[Pair]:
    yield from _pairs(
        [
            (r"0.\overline{3}", [r"\frac{1}{3}", r"0.\overline{33}"], ["0.3", r"0.\overline{31}", r"3.\overline{0}"]),
            (r"1.2\overline{34}", [r"\frac{611}{495}"], ["1.234", r"1.\overline{234}"]),
            ("1e-5", ["0.00001", r"10^{-5}", r"1 \times 10^{-5}"], ["1.2e-5", "1e-6", "0"]),
            ("1e-9", ["1e-9", r"10^{-9}"], ["2e-9", "0", "1e-8"]),
            ("4.5e33", [r"4.5 \times 10^{33}", r"4.5\cdot 10^{33}"], ["4.6e33", "4.5e32", "4.5"]),
            ("2.88e-19", [r"2.88 \times 10^{-19}"], ["0", "2.88e-18"]),
            ("100", ["100.0", "100."], ["99.9999", "100.01", "1000"]),
            ("1000000", ["1,000,000", "1e6"], ["1000001", "999999"]),
            ("0", ["0.0", "-0"], ["0.0000001", "1e-9"]),
            ("0.1", [r"\frac{1}{10}", ".1", "0.10", r"10\%"], ["0.01", "1", "0.11"]),
            ("18.90", [r"\$18.9", "18.9"], ["19", "18.8"]),
            ("1/3", ["0.333333", "0.3333333"], ["0.33", "0.333", "0.34"]),
            ("2/3", ["0.666667"], ["0.67", "0.666", "0.6"]),
            ("6.022e23", [r"6.022 \times 10^{23}"], ["6.022e22", "6.022", "6.02e23"]),
            (".5", ["0.50", "1/2"], ["0.05", "5"]),
            ("3.14", ["3.14", "3.140"], [r"\pi", "3.14159"]),
            ("12:30", ["12:30"], ["12:03", "1:30"]),
            (r"12:30 \text{ PM}", [r"12:30 \text{ PM}"], [r"12:30 \text{ AM}"]),
            (r"\infty", [r"\infty", "∞", r"+\infty"], [r"-\infty", "0", "1"]),
            ("52_8", ["52_{8}", "52", "42_{10}"], ["52_9", "42_8"]),
            (r"90^\circ", ["90", "90°", r"90 \text{ degrees}", r"90^{\circ}"], [r"80^\circ", "9"]),
        ]
    )


def spellings() -> Iterator[Pair]:
    yield from _pairs(
        [
            (
                "42",
                [r"\text{42}", r"\mathbf{42}", "４２", r"\mathrm{42}", " 42 ", "42.", r"$42$", r"\boxed{42}"],
                ["24"],
            ),
            ("42", ["4\u200b2\ufeff", r"\,42\,", r"{42}", r"\left(42\right)", r"\displaystyle 42"], ["4 2 1"]),
            ("-3", ["−3", "－３", r"-\text{3}"], ["3", "--3", "+3"]),
            (r"2\pi", ["2π", r"\pi 2", r"2 \cdot \pi"], [r"\pi^2", "2"]),
            (r"\frac{3}{4}", [r"\tfrac34", "¾", r"\frac34", r"{3 \over 4}"], [r"\frac43", r"\frac{3}{44}"]),
            ("(1,2)", [r"\left( 1, 2 \right)", "（1，2）"], [r"\left[1,2\right]"]),
            ("50%", ["50％", r"50\%"], ["5％"]),
        ]
    )


def garbage() -> Iterator[Pair]:
    hundred = ",".join(map(str, range(101)))
    for gold in ("7", r"\frac{1}{2}", "x+1", "(1,2)"):
        yield from _pairs(
            [
                (
                    gold,
                    [gold],
                    [
                        "", " ", "%", "{,}", "=", r"\frac{0}{0}", r"\text{the answer}", hundred, "?", r"\infty",
                        r"\text{see above}", "..." , r"\frac{1}{", "None", "\\\\",
                    ],
                )
            ]
        )  # fmt: skip


FAMILIES = (
    *(fractions, thousands, percent, units, radicals, polynomials, functions, counting, intervals, collections_of),
    *(matrices, complex_numbers, names, words_and_choices, decimals, spellings, garbage),
)
