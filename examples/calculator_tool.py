"""A tool: `trainer: {tools: ["calculator_tool.py:calculator"]}` lets a model compute."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """
    Evaluate an arithmetic expression.

    Args:
        expression: The expression, such as "3 + 4 * 5".
    """

    def evaluate(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](evaluate(node.operand))
        raise ValueError(f"{ast.unparse(node)} is no arithmetic")

    return str(evaluate(ast.parse(expression, mode="eval").body))
