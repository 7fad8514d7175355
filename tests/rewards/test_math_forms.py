# ruff: noqa: RUF001, E501 -- the forms are written as models write them
"""How answers are written: each form scores 1 with the right answer of a row and 0 with a wrong one."""

import time

import pytest

from mrl.rewards.math import math

LIMIT_S = 5.0  # hours where a power is computed


def score(response, answer, prompt="", **kwargs):
    return math(prompt=prompt, response=response, answer=answer, extra={}, **kwargs)["score"]


FORMS = [
    # response, right answer, wrong answer
    ("<answer>58</answer>", "58", "57"),
    ("<think>I get 42.</think>\n<answer>58</answer>", "58", "42"),
    ("<answer>-3</answer>", "-3", "3"),
    ("<answer>1/2</answer>", "1/2", "2"),
    ("<answer>58.</answer>", "58", "5"),
    ("<answer>1,058</answer>", "1058", "58"),
    ("<answer>$58</answer>", "58", "57"),
    ("<answer>58 apples</answer>", "58", "57"),
    ("(58)", "58", "57"),
    ("[58]", "58", "57"),
    ("\"58\"", "58", "57"),
    ("`58`", "58", "57"),
    ("答案是58。", "58", "57"),
    ("The answer is −5.", "-5", "5"),
    ("Answer: (C)", "C", "B"),
    (r"\boxed{18}", r"\$18", "17"),
    (r"\boxed{18.90}", r"\$18.90", "18"),
    (r"\boxed{32348}", r"\$32,\!348", "348"),
    (r"\boxed{\$32,\!348}", "32348", "32"),
    (r"\boxed{18}", "18 dollars", "17 dollars"),
    (r"\boxed{18 dollars}", "18", "17"),
    (r"\boxed{1/2^{98}}", r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{42.}", "42", "4"),
    (r"\boxed{1\,000}", "1000", "1"),
    (r"\boxed{0.\overline{3}}", "1/3", "0.3"),
    (r"\boxed{1/3}", r"0.\overline{3}", "0.3"),
    (r"\boxed{0.1\overline{6}}", "1/6", "0.16"),
    (r"\boxed{0.(3)}", "1/3", "0.3"),
    (r"\boxed{5\text{ million}}", "5000000", "5"),
    ("The answer is 5 million.", "5000000", "5"),
    (r"\boxed{2 1/2}", "5/2", "3/2"),
    (r"\boxed{2\frac{1}{2}}", "2.5", "1"),
    (r"\boxed{½}", "1/2", "2"),
    (r"\boxed{1.5e-3}", "0.0015", "1.5"),
    (r"\boxed{1.6\times10^{-19}}", "1.6e-19", "1.6e-20"),
    (r"\boxed{1.6\times10^{-19}}", r"1.6 \times 10^{-19}", r"1.7 \times 10^{-19}"),
    (r"\boxed{50\%}", "50%", "5%"),
    (r"\boxed{50}", r"50\%", r"5\%"),
    (r"\boxed{0.5}", "50%", "0.05"),
    ("50 percent", "50%", "51%"),
    (r"\boxed{[1,2)}", "[1,2)", "(1,2)"),
    (r"\boxed{(1,2)}", "(1,2)", "(2,1)"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", r"\{1,3\}"),
    (r"\boxed{1, 2}", "1,2", "1,3"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\boxed{\text{Monday}}", "Monday", "Tuesday"),
    ("The answer is Monday.", "Monday", "Friday"),
    (r"\boxed{yes}", "yes", "no"),
    (r"\boxed{on}", "on", "no"),
    (r"\boxed{\text{yes}}", r"\text{Yes}", r"\text{No}"),
    (r"\boxed{90^\circ}", "90", "9"),
    ("90°", r"90^\circ", "80"),
    (r"\boxed{90 degrees}", "90", "9"),
    (r"\boxed{5 cm^2}", "5", "25"),
    (r"\boxed{5 \text{ cm}^2}", "5 cm^2", "25"),
    (r"\boxed{60 km/h}", "60", "6"),
    (r"\boxed{５８}", "58", "5"),
    (r"\boxed{−5}", "-5", "5"),
    ("５８", "58", "85"),
    ("the result is ５８．", "58", "8"),
    ("I get 42</think>58", "58", "42"),
    ("<thinking>42</thinking>\n\\boxed{58}", "58", "42"),
    (r"\boxed{(C)}", "C", "B"),
    ("C", "C", "D"),
    ("(C) 58", "C", "A"),
    ("C. 58", "C", "A"),
    ("**C**", "C", "A"),
    (r"\boxed{\text{C}}", "(C)", "(A)"),
    ("The answer is **58**.", "58", "57"),
    (r"The answer is $\frac{1}{2}$ meters.", "1/2", "2"),
    ("The answer is 5 + 3 = 8.", "8", "5"),
    ("So the answer is: 58.\nI hope this answer is helpful.", "58", "57"),
    ("#### 58", "58", "57"),
    (r"\boxed{58}", "steps\n#### 58", "steps\n#### 57"),
    ("The final answer is 3.5.", "3.5", "3"),
    ("58 apples", "58", "57"),
    ("There are 58 apples.", "58", "57"),
    ("x = 58", "58", "57"),
    ("$x = 58$", "58", "57"),
    (r"\boxed{x=58}", "58", "57"),
    (r"\boxed{58}", "x=58", "x=57"),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", r"3\sqrt{2}"),
    (r"\boxed{2√3}", r"2\sqrt{3}", r"3\sqrt{2}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", "(x+2)^2"),
    (r"\boxed{x>3}", "x>3", "x<3"),
    (r"\boxed{(-∞, 3) ∪ (5, ∞)}", r"(-\infty,3)\cup(5,\infty)", r"(-\infty,3)"),
    (r"\boxed{2^{1000}}", "2^{1000}", "2^{1000}+1"),
    (r"\boxed{4^{500}}", "2^{1000}", "2^{1001}"),
    (r"\boxed{9^{9^{9^{9}}}}", "9^{9^{9^{9}}}", "9^{9^{9^{8}}}"),
    (r"\boxed{10^{10^{10}}}", "10^{10^{10}}", "10^{10^{9}}"),
    (r"\boxed{3:4}", "3:4", "4:3"),
    (r"\boxed{12:30}", "12:30", "12:31"),
    (r"\boxed{\pi}", "π", "3"),
    (r"\boxed{1,000,000}", "10^6", "10^7"),
    (r"\boxed{\frac{1}{2^{98}}, 1}", r"\frac{1}{2^{98}}, 1", r"\frac{1}{2^{99}}, 1"),
    (r"\boxed{0.0000002}", "0.0000002", "0.0000001"),
    (r"\boxed{x/2^{98}}", "x/2^{98}", "x/2^{99}"),
    (r"\boxed{1 000}", "1000", "1"),
    (r"\boxed{a}", "a", "b"),
    (r"\boxed{3 \frac{1}{2} \text{ hours}}", "3.5", "1.5"),
    (r"-\frac{1}{2}", "-0.5", "0.5"),
    ("The answer is - 7.", "-7", "7"),
    (r"\boxed{10!}", "3628800", "10"),
    (r"\boxed{3+4i}", "3+4i", "3-4i"),
    (r"\boxed{\$5.00}", "5", "4"),
    (r"\boxed{5 dollars and 30 cents}", "5 dollars and 30 cents", "6 dollars"),
    (r"\boxed{星期一}", "星期一", "星期二"),
    (r"<answer>\frac{3}{4}</answer>", "0.75", "0.34"),
    (r"<answer>$\frac{3}{4}$</answer>", "3/4", "4/3"),
    ("<answer>The answer is 58 apples.</answer>", "58", "57"),
    (r"<answer>\boxed{58}</answer>", "58", "57"),
    ("<answer>58", "58", "57"),
    ("<ANSWER>\n58\n</ANSWER>", "58", "57"),
    ("(-3)", "-3", "3"),
    (r"\boxed{(-3)}", "-3", "3"),
    ("So we get (58).", "58", "57"),
    ("Therefore, the value is [58].", "58", "57"),
    ("The result is \"58\".", "58", "57"),
    ("**58**", "58", "57"),
    (r"$$\frac{1}{2}$$", "1/2", "2"),
    (r"\[ x = 58 \]", "58", "57"),
    (r"\(58\)", "58", "57"),
    ("最终答案：58", "58", "57"),
    ("答案为 −5", "-5", "5"),
    ("所以答案是(C)。", "C", "B"),
    ("答案：½", "1/2", "2"),
    ("The answer is A.", "A", "B"),
    ("The answer is (B) because 58 > 42.", "B", "58"),
    ("The correct option is (D).", "D", "C"),
    ("Answer: B", "B", "C"),
    ("<answer>(C)</answer>", "C", "B"),
    ("<answer>C</answer>", "C", "B"),
    ("<answer>Option C</answer>", "C", "B"),
    ("<answer>C) 58</answer>", "C", "B"),
    ("<answer>−5</answer>", "-5", "5"),
    ("<answer>５８</answer>", "58", "5"),
    ("<answer>58%</answer>", "58%", "57%"),
    ("<answer> 2 x 10^3 </answer>", "2000", "3"),
    ("<answer>[1, 2]</answer>", "[1,2]", "(1,2)"),
    ("<answer>x = 58</answer>", "58", "57"),
    ("<answer>58 km/h</answer>", "58", "57"),
    ("<answer>1,2,3</answer>", "1,2,3", "1,2,4"),
    ("<answer>no solution</answer>", "no solution", "1"),
    (r"\boxed{\text{no solution}}", "No solution", "solution no"),
    (r"\boxed{\emptyset}", r"\emptyset", "0"),
    (r"\boxed{\text{even}}", "even", "odd"),
    (r"\boxed{-\infty}", r"-\infty", r"\infty"),
    (r"\boxed{\frac{\pi}{2}}", "π/2", "2/π"),
    (r"\boxed{\dfrac{3}{4}}", "3/4", "4/3"),
    (r"\boxed{\tfrac34}", "3/4", "4/3"),
    (r"\boxed{.5}", "0.5", "5"),
    (r"\boxed{0.50}", "0.5", "5"),
    (r"\boxed{+5}", "5", "-5"),
    (r"\boxed{5.0}", "5", "50"),
    (r"\boxed{1e3}", "1000", "1"),
    (r"\boxed{2^{-3}}", "1/8", "8"),
    (r"\boxed{10^{-30}}", "10^{-30}", "10^{-31}"),
    (r"\boxed{10^{-30}}", "0.000000000000000000000000000001", "0"),
    (r"\boxed{0}", "0", "10^{-30}"),
    (r"\boxed{\sqrt{2}/2^{98}}", r"\sqrt{2}/2^{98}", r"\sqrt{2}/2^{99}"),
    (r"\boxed{\{1/2^{98}\}}", r"\{1/2^{98}\}", r"\{1/2^{99}\}"),
    (r"\boxed{(1/2^{98},1)}", "(1/2^{98},1)", "(1/2^{99},1)"),
    (r"\boxed{x = 1/2^{98}}", "1/2^{98}", "1/2^{99}"),
    (r"\boxed{\frac{2^{100}+1}{2^{100}}}", r"\frac{2^{100}+1}{2^{100}}", "1"),
    (r"\boxed{1-10^{-20}}", "1-10^{-20}", "1"),
    (r"\boxed{\frac{1}{100!}}", r"\frac{1}{100!}", r"\frac{1}{101!}"),
    (r"\boxed{0.333333}", "1/3", "1/4"),
    (r"\boxed{33.3333\%}", r"33.3333\%", r"33\%"),
    (r"\boxed{3.14159}", "3.14159", "3.1415"),
    (r"\boxed{\text{(A), (C)}}", r"\text{(A), (C)}", "A"),
    (r"\boxed{A, C}", "A,C", "A,B"),
    (r"\boxed{AC}", "AC", "AB"),
    (r"\boxed{BC}", "BC", "CD"),
    (r"\boxed{5 \text{ and } 7}", "5, 7", "5, 8"),
    (r"\boxed{5 or 7}", r"\{5,7\}", "5"),
    (r"\boxed{x=1, y=2}", "x=1, y=2", "x=2, y=1"),
    (r"\boxed{(x,y)=(1,2)}", "(1,2)", "(2,1)"),
    (r"\boxed{f(x)=2x}", "2x", "3x"),
    (r"\boxed{y = 2x+3}", "y=2x+3", "y=2x+4"),
    (r"\boxed{2x+3}", "2x+3", "2x-3"),
    (r"\boxed{x \in [1,2]}", "[1,2]", "(1,2)"),
    (r"\boxed{3\text{ hours }}", "3", "4"),
    (r"\boxed{3\,\text{m}^2}", "3", "9"),
    (r"\boxed{3~\mathrm{cm}}", "3", "4"),
    (r"\boxed{\$3.50}", "3.50", "350"),
    (r"\boxed{£3}", "3", "4"),
    (r"\boxed{3€}", "3", "4"),
    (r"\boxed{100\pi}", r"100\pi", "100"),
    ("100π", r"100\pi", "100"),
    (r"\boxed{100 \text{ square units}}", "100", "10"),
    (r"\boxed{2:3}", "2:3", "3:2"),
    (r"\boxed{2 : 3}", "2/3", "3/2"),
    (r"\boxed{1/2, 1/3}", "1/3, 1/2", "1/3, 1/4"),
    (r"\boxed{\left(\frac{1}{2}, 3\right)}", "(0.5, 3)", "(3, 0.5)"),
    (r"\boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\boxed{58}\n", "58", "57"),
    (r"\boxed{ 58 }", "58", "57"),
    (r"\boxed{58}.", "58", "57"),
    ("**Answer: 58**", "58", "57"),
    ("### Final Answer\n\n58", "58", "57"),
    ("Final answer is 58. I hope it is correct.", "58", "57"),
    (r"\boxed{5\,\%}", "5%", "6%"),
    (r"\boxed{1{,}234}", "1234", "234"),
    (r"\boxed{1 234 567}", "1234567", "567"),
    (r"\boxed{３．１４}", "3.14", "314"),
    (r"\boxed{٣}", "3", "4"),
    (r"<|channel|>analysis<|message|>\boxed{42}<|end|><|start|>assistant<|channel|>final<|message|>\boxed{58}", "58", "42"),
    (r"[THINK]\boxed{42}[/THINK]58", "58", "42"),
    ("<reasoning>\n\\boxed{42}\n</reasoning>\n<answer>\n58\n</answer>", "58", "42"),
    (r"Let me think. \boxed{42}</think> The answer is 58.", "58", "42"),
    (r"\boxed{58\frac{1}{2}}", "58.5", "29"),
    ("-2 1/2", "-2.5", "-1.5"),
    (r"\boxed{-2\frac{1}{2}}", "-2.5", "-1"),
    (r"\boxed{0.\dot{3}}", "1/3", "0.3"),
    (r"\boxed{3.\overline{9}}", "4", "3.9"),
    (r"\boxed{-0.\overline{3}}", "-1/3", "1/3"),
    (r"\boxed{\log_2 3}", r"\log_2 3", r"\log_3 2"),
    (r"\boxed{\ln 2}", r"\ln 2", r"\log_{10} 2"),
    (r"\boxed{58^\circ}", "58", "59"),
    ("58 degrees", r"58^\circ", "59"),
    (r"\boxed{58^{\circ}\text{C}}", "58", "59"),
    (r"\boxed{3 million}", "3000000", "3"),
    ("<answer>58 or 42</answer>", "58,42", "42"),
    (r"\boxed{1}\boxed{58}", "58", "1"),
    ("17 + 41 = 58", "58", "17"),
    ("17 + 41 = **58**", "58", "41"),
    ("It costs $18.", "18", "17"),
    ("It costs $18 in total, so $36 for two.", "36", "18"),
    (r"It costs \$18.", "18", "8"),
    ("Total: 1,058 apples.", "1058", "58"),
    ("58 is the answer.", "58", "57"),
    ("Thus, 58.\n\nLet me know if you need 3 more examples.", "3", "58"),
    (r"\boxed{Yes}", "yes", "no"),
    ("Answer: yes", "Yes", "No"),
    (r"\boxed{True}", "true", "false"),
    (r"\boxed{p \wedge q}", r"p \wedge q", r"p \vee q"),
    (r"\boxed{2023-05-01}", "2023-05-01", "2023-05-02"),
    (r"\boxed{\text{May 5}}", "May 5", "May 6"),
    (r"\boxed{0.\overline{142857}}", "1/7", "0.142"),
    (r"\boxed{2×3}", "6", "6x"),
    (r"\boxed{2·3}", "6", "23"),
    ("答案是58个苹果。", "58", "57"),
    (r"\boxed{58元}", "58", "57"),
    (r"\boxed{5万}", "50000", "5"),
    (r"\boxed{2 × 10³}", "2000", "200"),
    ("The answer is 6 ÷ 2 = 3.", "3", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "right", "wrong"), FORMS)
def test_a_form_equals_the_right_answer_and_no_other(response, right, wrong):
    assert (score(response, right), score(response, wrong)) == (1.0, 0.0)


UNREAD = {
    "reasoning that is not closed": ("<think>58", ""),
    "a box in reasoning that is not closed": (r"<think>\boxed{58}", ""),
    "reasoning that the prompt opened": (r"\boxed{58}", "Think first.<think>\n"),
    "a box that is not closed": (r"it is \boxed{58", ""),
    "two answers in a box": (r"\boxed{58 or 42}", ""),
    "two answers in tags": ("<answer>58, 42</answer>", ""),
    "nothing": ("", ""),
    "an empty box": (r"58 \boxed{}", ""),
    "empty tags": ("58 <answer></answer>", ""),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_is_no_answer_of_the_response_is_wrong(case):
    response, prompt = UNREAD[case]
    assert score(response, "58", prompt) == 0.0


ORDER = [
    (r"<answer>1</answer> \boxed{2} #### 3", "2"),
    ("<answer>1</answer>\nThe answer is 2.\n#### 3", "1"),
    ("The answer is 1.\n#### 3", "3"),
    ("The answer is 1.\nSee step 4.", "1"),
    ("First 1, then 2.", "2"),
    (r"\boxed{1} or rather \boxed{2}", "2"),
    ("<answer>1</answer><answer>2</answer>", "2"),
    ("The answer is 1. No: the answer is 2. I hope this answer is clear.", "2"),
]


@pytest.mark.parametrize(("response", "first"), ORDER)
def test_of_several_marks_the_first_of_the_documented_order_counts(response, first):
    assert [score(response, answer) for answer in "1234"] == [float(answer == first) for answer in "1234"]


LARGE = [
    "9^{9^{9^{9}}}", "10^{10^{10}}", "(10^9)!", r"\binom{10^9}{5}", "(x+1)^{100000}", "e^{e^{e^{e^{e}}}}",
    r"7^{7^{7^7}} \mod 10", "(" * 140 + "1" + ")" * 140, "{" * 30 + "1" + "}" * 30,
]  # fmt: skip


@pytest.mark.parametrize("text", LARGE)
def test_what_is_too_large_to_compute_equals_only_itself(text):
    start = time.process_time()
    assert score(rf"\boxed{{{text}}}", "81") == 0.0
    assert score(rf"\boxed{{{text}}}", text) == 1.0
    assert time.process_time() - start < LIMIT_S


def test_powers_are_compared_exactly_up_to_a_million_digits():
    assert score(r"\boxed{4^{500000}}", "2^{1000000}") == 1.0
    assert score(r"\boxed{2^{1000000}}", "2^{1000000}+1") == 0.0


@pytest.mark.parametrize("answer", ["Monday", "no solution", "星期一", r"\text{even}", "AB", r"\mathbb{Z}_+", "a/b/c^"])
def test_an_answer_that_is_no_number_is_compared_and_never_without_a_score(answer):
    assert score(rf"\boxed{{{answer}}}", answer) == 1.0
    assert score(r"\boxed{17}", answer) == 0.0


def test_letters_in_another_order_are_another_word():
    assert score(r"\boxed{on}", "no") == score(r"\boxed{\text{elbow}}", r"\text{below}") == 0.0
